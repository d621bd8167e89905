"""What a mixture-of-experts layer costs: megnorm's beside transformers' OLMoE block and DeepSpeed's MoE layer.

CPU-seconds of a forward and backward pass (all threads of the process), taken in turn from long-lived processes, and
beside the goals the medians over turns of their ratios. "products" are the experts' matrix products alone: their share
of our layer's time is the last column. Nothing is asserted: the figures depend on the machine and on what else runs.

    python tools/bench_moe.py --shapes even uneven skewed --dtypes fp32 bf16 --steps 20 --threads 1
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from megnorm.testing.bench_moe import CONTESTANTS, SHAPES, compare_moe, loads
from megnorm.testing.bench_step import Comparison

GOALS = {"transformers": 1.0, "transformers, loop": 1.0, "deepspeed": 2.0}


def costs_table(results: list[Comparison]) -> Table:
    """A pass of each layer: milliseconds of CPU, median and least; tokens a second of CPU."""
    table = Table(title="CPU-milliseconds of a forward and backward pass")
    for heading in ("", "", "median", "least", "tokens/CPU-s"):
        table.add_column(heading, justify="right" if heading else "left")
    for result in results:
        tokens = SHAPES[result.shape].tokens
        for name, costs in result.costs.items():
            table.add_row(f"{result.shape} {result.dtype}", name, f"{1e3 * result.median(name):.1f}",
                          f"{1e3 * min(cost.cpu for cost in costs):.1f}", f"{tokens / result.median(name):,.0f}")
        table.add_section()
    return table


def ratios_table(results: list[Comparison]) -> Table:
    """Their cost over ours, with the goal; the share of ours that the products alone take. DeepSpeed's layer pads every
    expert to the fullest, whose share the first column has."""
    table = Table(title="ratios (+: goal, at least)")
    for heading in ("", "fullest expert\n/ mean", *(f"{name}\n/ ours" for name in GOALS), "products\n/ ours"):
        table.add_column(heading, justify="right" if heading else "left")
    for result in results:
        counts = loads(SHAPES[result.shape])
        table.add_row(f"{result.shape} {result.dtype}", f"{counts.max() * len(counts) / counts.sum():.2f}",
                      *(f"{result.ratio(name, 'ours'):.2f} +{goal:.1f}" for name, goal in GOALS.items()),
                      f"{100 * result.ratio('products', 'ours'):.0f} %")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", choices=["fp32", "bf16"], default=["fp32"])
    parser.add_argument("--steps", type=int, default=20, help="passes that count, of each layer")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if args.steps < 1 or args.threads < 1:
        parser.error("--steps and --threads must be at least 1")
    console = Console(width=max(100, Console().width))
    results = []
    with console.status("starting") as status:
        for shape in args.shapes:
            for dtype in args.dtypes:
                results.append(compare_moe(shape, dtype, args.steps, args.threads,
                                           progress=lambda text: status.update(f"{shape} {dtype}: {text}")))
    console.print(costs_table(results), ratios_table(results))
    console.print(f"{args.steps} passes of each of {len(CONTESTANTS)}, {args.threads} thread(s) of {os.cpu_count()} "
                  f"cores, load average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
