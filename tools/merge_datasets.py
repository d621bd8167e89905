"""Joins indexed datasets one behind the other, in the order given.

Example, for the shares that preprocess_data.py --world-size wrote:
  python tools/merge_datasets.py --input 'data/t_*_of_*_text_document' --output-prefix data/t_text_document
"""

from __future__ import annotations

import argparse
import glob
from collections.abc import Sequence

from megnorm.data.combine import merge
from megnorm.data.command import run_tool
from megnorm.data.errors import DataError


def find(entries: Sequence[str]) -> list[str]:
    """Prefixes of datasets, patterns replaced by their sorted matches."""
    out: list[str] = []
    for entry in entries:
        found = [name.removesuffix(".idx") for name in sorted(glob.glob(f"{entry}.idx"))]
        if not found:
            raise DataError(f"{entry}.idx: no such file, and nothing matches it as a pattern")
        out += found
    return out


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--input", nargs="+", required=True, metavar="PREFIX", help="datasets, or patterns (sorted)"
    )
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help="the dataset to write")
    args = parser.parse_args()
    prefixes = find(args.input)
    documents = merge(prefixes, args.output_prefix)
    print(f"{args.output_prefix}: {documents:,} documents of {len(prefixes)} datasets")
    return 0


if __name__ == "__main__":
    run_tool(main)
