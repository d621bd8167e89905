"""What parallelism costs: bytes that ranks send in a step beside the plan's formula, the share of time that they wait
for each other, and what norms over a sharded axis cost above norms over each rank's own part.

    python tools/bench_parallel.py --hidden 256 --layers 4 --sequence 256
"""

import argparse
import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from megnorm.config import Config, parse_config
from megnorm.plan.communication import volumes
from megnorm.plan.layout import make_layout
from megnorm.testing.ranks import run_ranks
from megnorm.testing.volume import measured_step

LAYOUTS = [(2, {"tp": 2}), (2, {"tp": 2, "sp": True}), (2, {"cp": 2}), (2, {"pp": 2}), (2, {"zero_stage": 1}),
           (2, {"zero_stage": 3}), (4, {"tp": 2, "pp": 2})]
SPANNING = {"scheme": "pre", "overrides": {":": {
    "attention": {"q_norm": {"scope": "all_heads"}, "k_norm": {"scope": "all_heads"}}, "ffn": {"mid_norm": "default"}}}}


def make_config(args: argparse.Namespace, parallel: dict, norm: str | dict = "hybrid_star") -> Config:
    """A decoder of the given size under a layout."""
    return parse_config({
        "run_dir": "unused",
        "model": {"layers": args.layers, "hidden": args.hidden, "heads": 8, "kv_heads": 4, "vocab_size": 4096,
                  "norm": norm},
        "data": {"sequence_length": args.sequence, "train": "unused"}, "parallel": parallel,
        "train": {"steps": args.steps, "micro_batch": 2, "global_batch": 8}, "optimizer": {"lr": 1e-3},
        "schedule": {"kind": "constant"}})


def volume_table(args: argparse.Namespace) -> Table:
    """Each layout's traffic by axis and kind, of its rank 0. The formulas cover the model's part; the rest is the
    engine's: gradients and weights over dp (the same ranks as cp, where there is one), tied gradients over pp."""
    table = Table(title="sent by rank 0 in a step")
    for heading in ("layout", "axis", "kind", "counted", "formula", "share of the step's time"):
        table.add_column(heading)
    for world, parallel in LAYOUTS:
        config = make_config(args, parallel)
        layout = make_layout(config, world)
        rank = run_ranks(measured_step, world, config, args.steps, timeout=600)[0]
        planned = volumes(config, layout, rank["stage"])
        for (axis, kind), size in sorted(rank["sent"].items(), key=lambda item: -item[1]):
            formula = planned.get((axis, kind))
            table.add_row(" ".join(f"{k}={v}" for k, v in parallel.items()), axis, kind, f"{size / 2**20:.3f} MiB",
                          f"{formula / 2**20:.3f} MiB" if formula else "-",
                          f"{rank['seconds'][axis, kind] / rank['wall']:.1%}")
    return table


def spanning_lines(args: argparse.Namespace) -> list[str]:
    """Time of a step under TP 2, with norms over all heads and the inner axis, against norms of each rank's part."""
    config = make_config(args, {"tp": 2}, SPANNING)
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(args.rounds):
        for local in (False, True):
            ranks = run_ranks(measured_step, 2, config, args.steps, local, timeout=600)
            times[local].append(sum(rank["cpu"] for rank in ranks))
    ratios = sorted(a / b for a, b in zip(times[False], times[True], strict=True))
    return [f"norms over sharded axes (q and k over all heads, FFN-mid), tp=2: {median(ratios):.3f} x the CPU time of "
            f"norms over each rank's own part ({ratios[0]:.3f} to {ratios[-1]:.3f}, {len(ratios)} pairs)"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 256), ("layers", 4), ("sequence", 256), ("steps", 4), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    console = Console()
    console.print(volume_table(args))
    for line in spanning_lines(args):
        console.print(line)


if __name__ == "__main__":
    main()
