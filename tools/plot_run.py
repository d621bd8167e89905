"""Draws the loss curves of runs: python tools/plot_run.py runs/demo [runs/other ...] -o loss.png"""

import argparse
import sys

from megnorm.observe.plot import plot_runs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dirs", nargs="+", metavar="RUN_DIR", help="directories with metrics.jsonl")
    parser.add_argument("-o", "--output", required=True, help="the picture to write, such as loss.png")
    arguments = parser.parse_args()
    try:
        plot_runs(arguments.run_dirs, arguments.output)
    except (OSError, ValueError) as error:
        print(f"plot_run: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
