"""Checks datasets: sizes, offsets, boundaries, ids, ends of documents, digests. Exits with 2 for a fault."""

from __future__ import annotations

import argparse

from megnorm.data.command import USER_ERROR, run_tool
from megnorm.data.verify import verify


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prefix", nargs="+", metavar="PREFIX", help="a dataset is PREFIX.bin and PREFIX.idx")
    parser.add_argument(
        "--vocab-size", type=int, metavar="V", help="ids must be below (default: what the sidecar says)"
    )
    args = parser.parse_args()
    bad = 0
    for prefix in args.prefix:
        held, faults = verify(prefix, args.vocab_size)
        bad += bool(faults)
        print(f"{prefix}: {'FAULTY' if faults else 'sound'}")
        for line in held:
            print(f"  holds: {line}")
        for line in faults:
            print(f"  fault: {line}")
    return USER_ERROR if bad else 0


if __name__ == "__main__":
    run_tool(main)
