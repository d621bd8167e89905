"""Writes the Python standard library's own sources as a corpus: train.jsonl and valid.jsonl."""

from __future__ import annotations

import argparse
from pathlib import Path

from megnorm.data.command import run_tool
from megnorm.data.corpus import write_stdlib_corpus


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--output-dir", type=Path, required=True, metavar="DIR", help="folder for the two files"
    )
    parser.add_argument(
        "--validation-every",
        type=int,
        default=32,
        metavar="N",
        help="about one file in N goes to valid.jsonl, chosen by a hash of its path (default: %(default)s)",
    )
    args = parser.parse_args()
    report = write_stdlib_corpus(args.output_dir, args.validation_every)
    for part in ("train", "valid"):
        megabytes = report.text_bytes[part] / 1e6
        print(f"{args.output_dir / part}.jsonl: {report.files[part]} files, {megabytes:.1f} MB of text")
    if report.undecodable:
        print(f"left out: {report.undecodable} files that are not UTF-8")
    return 0


if __name__ == "__main__":
    run_tool(main)
