"""Shows what an indexed dataset holds: its head, statistics, and one document as text."""

from __future__ import annotations

import argparse

from megnorm.data.command import run_tool
from megnorm.data.inspect import describe, histogram, show_document


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prefix", metavar="PREFIX", help="the dataset is PREFIX.bin and PREFIX.idx")
    parser.add_argument("--document", type=int, metavar="K", help="decode document K, counted from 0")
    parser.add_argument(
        "--max-tokens", type=int, default=2000, metavar="N", help="of the document (default: %(default)s)"
    )
    parser.add_argument("--histogram", action="store_true", help="also show documents by length")
    args = parser.parse_args()
    if args.document is None:
        print(describe(args.prefix))
        if args.histogram:
            print(histogram(args.prefix))
    else:
        print(show_document(args.prefix, args.document, args.max_tokens))
    return 0


if __name__ == "__main__":
    run_tool(main)
