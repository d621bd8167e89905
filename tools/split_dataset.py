"""Cuts an indexed dataset by whole documents into PREFIX_train, PREFIX_valid and PREFIX_test."""

from __future__ import annotations

import argparse

from megnorm.data.combine import split
from megnorm.data.command import run_tool


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", required=True, metavar="PREFIX", help="the dataset to cut")
    parser.add_argument(
        "--output-prefix", required=True, metavar="PREFIX", help="beginning of the parts' names"
    )
    parser.add_argument(
        "--split",
        default="949,50,1",
        metavar="A,B,C",
        help="shares of the three parts (default: %(default)s)",
    )
    args = parser.parse_args()
    for name, documents in split(args.input, args.output_prefix, args.split).items():
        print(f"{name}: {documents:,} documents")
    return 0


if __name__ == "__main__":
    run_tool(main)
