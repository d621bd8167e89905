"""What each norm scheme costs in a training step, beside pre: ratios of the medians, share of the norms, peak memory.

CPU-seconds of a step of the whole model (fp32, fused AdamW), one step of each scheme taken in turn; nothing is
asserted: the figures depend on the machine and on what else runs on it.

    python tools/bench_norms.py                                  # all schemes at both sizes
    python tools/bench_norms.py --sizes d256 --schemes hybrid_star peri --steps 15
"""

import argparse
import os

from rich.console import Console
from rich.table import Table

from megnorm.norms.schemes import find_scheme
from megnorm.observe.science import markdown
from megnorm.testing.bench_norms import SIZES, Cost, bench, known_schemes, limit


def rows(costs: dict[str, Cost]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells, the cheapest first; a ratio above its limit says so."""
    heads = ["scheme", "CPU-s a step", "x pre", "limit", "in norms", "peak MiB", "peak x pre"]
    lines = []
    for name, cost in sorted(costs.items(), key=lambda item: item[1].ratio):
        bound = limit(name)
        over = bound is not None and cost.ratio > bound
        allowed = "-" if bound is None else f"{bound:.2f}" + (" OVER" if over else "")
        lines.append([name, f"{cost.seconds:.3f}", f"{cost.ratio:.3f}", allowed, f"{100 * cost.norms:.1f} %",
                      f"{cost.peak / 2**20:.0f}", f"{cost.peak / costs['pre'].peak:.3f}"])
    return heads, lines


def show(console: Console, size: str, costs: dict[str, Cost], as_markdown: bool) -> None:
    """A size's table, and which schemes are beyond their limits."""
    heads, lines = rows(costs)
    if as_markdown:
        console.print(f"{size}\n\n{markdown(heads, lines)}", markup=False, soft_wrap=True)
    else:
        table = Table(*heads, title=f"{size}, against pre")
        for line in lines:
            table.add_row(*line)
        console.print(table)
    over = [name for name, cost in costs.items() if limit(name) is not None and cost.ratio > limit(name)]
    console.print(f"{size}: beyond the limit: {', '.join(over) or 'none'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--schemes", nargs="+", default=known_schemes(), metavar="NAME")
    parser.add_argument("--steps", type=int, default=7, help="steps that count, of each scheme")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    args = parser.parse_args()
    if args.steps < 1 or args.threads < 1:
        parser.error("--steps and --threads must be at least 1")
    try:
        for name in args.schemes:
            find_scheme(name, "--schemes")
    except ValueError as error:
        parser.error(str(error))
    console = Console()
    for size in args.sizes:
        with console.status(size) as status:
            costs = bench(SIZES[size], args.schemes, args.steps, args.threads, progress=status.update)
        show(console, size, costs, args.markdown)
    console.print(f"{args.steps} steps each, {args.threads} thread(s) of {os.cpu_count()} cores, "
                  f"load average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
