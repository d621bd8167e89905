"""What a training step costs: megnorm under its engine, beside transformers' Llama in a plain torch loop.

CPU-seconds a step (all threads of the process), taken in turn from long-lived processes, and beside the goals the
medians over turns of their ratios. Nothing is asserted: the figures depend on the machine and on what else runs on it.

    python tools/bench_step.py --shapes S M --dtypes fp32 bf16 --steps 10 --threads 1
"""

import argparse
import os
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from megnorm.testing.bench_step import CONTESTANTS, SHAPES, Comparison, compare

# Goals: transformers' cost over ours, and the floor's share of ours.
FASTER = {("S", "fp32"): 1.20, ("S", "bf16"): 1.35, ("M", "fp32"): 1.12, ("M", "bf16"): 1.15}
SHARE = {("S", "fp32"): 0.78, ("S", "bf16"): 0.58, ("M", "fp32"): 0.92, ("M", "bf16"): 0.80}
ENGINE_OVERHEAD, HYBRID_OVERHEAD = 1.03, 1.02


def costs_table(results: list[Comparison]) -> Table:
    """A step of each contestant: CPU-seconds, median, least and most; tokens a second of CPU and of the clock."""
    table = Table(title="CPU-seconds a step")
    for heading in ("", "", "median", "least", "most", "tokens/CPU-s", "tokens/s"):
        table.add_column(heading, justify="right" if heading else "left")
    for result in results:
        tokens = SHAPES[result.shape].tokens
        for name, costs in result.costs.items():
            cpu, wall = [cost.cpu for cost in costs], statistics.median(cost.wall for cost in costs)
            table.add_row(f"{result.shape} {result.dtype}", name,
                          *(f"{seconds:.3f}" for seconds in (result.median(name), min(cpu), max(cpu))),
                          f"{tokens / result.median(name):,.0f}", f"{tokens / wall:,.0f}")
        table.add_section()
    return table


def ratios_table(results: list[Comparison]) -> Table:
    """Each ratio beside its goal."""
    table = Table(title="ratios, and their goals (+: at least, -: at most)")
    for heading in ("", "llama\n/ pre", "llama\n/ hybrid_star", "hybrid_star\n/ pre", "engine\n/ plain",
                    "floor\n/ pre"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for result in results:
        key, ratio = (result.shape, result.dtype), result.ratio
        table.add_row(" ".join(key), f"{ratio('transformers', 'pre'):.3f} +{FASTER[key]:.2f}",
                      f"{ratio('transformers', 'hybrid_star'):.3f} +{FASTER[key]:.2f}",
                      f"{ratio('hybrid_star', 'pre'):.3f} -{HYBRID_OVERHEAD}",
                      f"{ratio('pre', 'plain pre'):.3f} -{ENGINE_OVERHEAD}",
                      f"{ratio('floor', 'pre'):.3f} +{SHARE[key]:.2f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parser.add_argument("--steps", type=int, default=10, help="steps that count, of each contestant")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--equal-malloc", action=argparse.BooleanOptionalAction, default=True,
                        help="give transformers the malloc settings that megnorm's launcher sets")
    args = parser.parse_args()
    if args.steps < 1 or args.threads < 1:
        parser.error("--steps and --threads must be at least 1")
    console = Console(width=max(100, Console().width))
    results = []
    with console.status("starting") as status:
        for shape in args.shapes:
            for dtype in args.dtypes:
                results.append(compare(shape, dtype, args.steps, args.threads, args.equal_malloc, CONTESTANTS,
                                       progress=status.update))
    console.print(costs_table(results), ratios_table(results))
    malloc = "the same malloc settings for all" if args.equal_malloc else "transformers without the malloc settings"
    console.print(f"{args.steps} steps each, {args.threads} thread(s) of {os.cpu_count()} cores, {malloc}, "
                  f"load average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
