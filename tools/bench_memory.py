"""The plan's estimate of memory beside what a training step really holds, on CPU ranks under the real engine.

Measured is every tensor that torch's allocator gives out, at the largest moment of the third step, on the rank that
needs most; where there are several, in the least of --repeat runs, for gloo's threads may release a buffer late.
DeepSpeed's reduce bucket is left out of both (its size is fixed, and would hide all else at these sizes).

    python tools/bench_memory.py                      # all cases, as a Markdown table
    python tools/bench_memory.py dp2_zero3 pp2_bf16   # some of them, with the parts
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megnorm.config import Config, parse_config
from megnorm.config.config import apply_override
from megnorm.plan.layout import make_layout
from megnorm.plan.memory import Memory, stage_memory
from megnorm.plan.page import memory_lines
from megnorm.testing.memory import Measured, measure_step
from megnorm.testing.ranks import run_ranks

SMALL = "train.global_batch=2 train.micro_batch=1 data.sequence_length=32"
EXPERTS = "model.moe={experts: 8, top_k: 2, ffn_hidden: 192}"
# Ranks and changes to the base configuration.
CASES: dict[str, tuple[int, str]] = {
    "alone": (1, "parallel.zero_stage=0"),
    "one_micro_batch": (1, "parallel.zero_stage=0 train.global_batch=2 model.norm=pre"),
    "small_batch": (1, "parallel.zero_stage=0 train.global_batch=1 train.micro_batch=1 data.sequence_length=64"),
    "small_batch_dp2_zero1": (2, f"parallel.zero_stage=1 {SMALL}"),
    "small_batch_dp2_zero2": (2, f"parallel.zero_stage=2 {SMALL}"),
    "small_batch_dp2_zero3": (2, f"parallel.zero_stage=3 {SMALL}"),
    "small_batch_dp2_zero1_bf16": (2, f"train.dtype=bf16 {SMALL}"),
    "small_batch_dp2_zero2_bf16": (2, f"parallel.zero_stage=2 train.dtype=bf16 {SMALL}"),
    "small_batch_dp2_zero3_bf16": (2, f"parallel.zero_stage=3 train.dtype=bf16 {SMALL}"),
    "small_batches_dp2_zero2_bf16": (2, f"parallel.zero_stage=2 train.dtype=bf16 {SMALL} train.global_batch=8"),
    "small_batches_dp2_zero3_bf16": (2, f"parallel.zero_stage=3 train.dtype=bf16 {SMALL} train.global_batch=8"),
    "selective": (1, "parallel.zero_stage=0 parallel.recompute=selective data.sequence_length=512"),
    "recompute": (1, "parallel.zero_stage=0 parallel.recompute=full model.layers=8"),
    "untied_peri": (1, "parallel.zero_stage=0 model.tie_embeddings=false model.norm=peri"),
    "gelu_layer_norm": (1, "parallel.zero_stage=0 model.activation=gelu model.bias=true "
                           "model.norm={scheme: pre, kind: layer, bias: true}"),
    "long": (1, "parallel.zero_stage=0 data.sequence_length=1536 train.micro_batch=1"),
    "deep": (1, "parallel.zero_stage=0 model.layers=12 model.vocab_size=256"),
    "dp2_zero1": (2, "parallel.zero_stage=1"),
    "dp2_zero2": (2, "parallel.zero_stage=2"),
    "dp2_zero3": (2, "parallel.zero_stage=3"),
    "dp2_zero1_bf16": (2, "parallel.zero_stage=1 train.dtype=bf16"),
    "dp2_zero2_bf16": (2, "parallel.zero_stage=2 train.dtype=bf16"),
    "dp2_zero3_bf16_recompute": (2, "parallel.zero_stage=3 train.dtype=bf16 parallel.recompute=full"),
    "tp2": (2, "parallel.tp=2 parallel.zero_stage=0"),
    "tp2_sp_bf16": (2, "parallel.tp=2 parallel.sp=true train.dtype=bf16"),
    "tp4_fewer_kv": (4, "parallel.tp=4 parallel.zero_stage=0 model.norm=normformer"),
    "cp2": (2, "parallel.cp=2 parallel.zero_stage=0"),
    "pp2": (2, "parallel.pp=2 parallel.zero_stage=0"),
    "pp2_bf16": (2, "parallel.pp=2 train.dtype=bf16"),
    "pp2_recompute": (2, "parallel.pp=2 parallel.zero_stage=0 parallel.recompute=full model.layers=8"),
    "tp2_pp2_zero1": (4, "parallel.tp=2 parallel.pp=2"),
    "experts": (1, f"parallel.zero_stage=0 {EXPERTS}"),
    "experts_recompute": (1, f"parallel.zero_stage=0 parallel.recompute=full {EXPERTS}"),
    "experts_shared_half": (1, "parallel.zero_stage=0 model.moe={experts: 4, top_k: 1, ffn_hidden: 128, "
                               "shared_experts: 1, layers: every 2}"),
    "experts_ep2_zero0": (2, f"parallel.ep=2 parallel.zero_stage=0 {EXPERTS}"),
    "experts_ep2_zero1": (2, f"parallel.ep=2 {EXPERTS}"),
    "experts_ep2_zero2_bf16": (2, f"parallel.ep=2 parallel.zero_stage=2 train.dtype=bf16 {EXPERTS}"),
    "experts_ep2_tp2": (4, f"parallel.ep=2 parallel.tp=2 parallel.sp=true {EXPERTS}"),
}


def case_config(changes: str) -> Config:
    """A model of about a million parameters with changes, as key=value."""
    raw: dict[str, Any] = {
        "run_dir": "unused", "seed": 7,
        "model": {"layers": 4, "hidden": 128, "heads": 4, "kv_heads": 2, "ffn_hidden": 384, "vocab_size": 2000,
                  "norm": "hybrid_star"},
        "data": {"sequence_length": 128, "train": "unused"}, "parallel": {},
        "train": {"steps": 5, "micro_batch": 2, "global_batch": 8}, "optimizer": {"lr": 2e-3},
        "schedule": {"kind": "constant"},
    }
    for change in _words(changes):
        apply_override(raw, change)
    return parse_config(raw, changes)


def _words(changes: str) -> list[str]:
    """Split at blanks that a new key follows."""
    words: list[str] = []
    for word in changes.split():
        words += [word] if "=" in word else [f"{words.pop()} {word}"]
    return words


def compare(world: int, config: Config) -> tuple[Memory, Measured]:
    """The rank that needs most: what the plan says, what was measured."""
    layout = make_layout(config, world)
    measured = run_ranks(measure_step, world, config, timeout=600.0)
    worst = max(range(world), key=lambda rank: measured[rank].peak)
    return stage_memory(config, layout, layout.coordinates(worst).pp, "cpu"), measured[worst]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="default: all of them")
    parser.add_argument("--repeat", type=int, default=5, help="runs of a case with several ranks (default: %(default)s)")
    args = parser.parse_args()
    if args.repeat < 1:
        parser.error("--repeat must be at least 1")
    if unknown := [name for name in args.cases if name not in CASES]:
        parser.error(f"no case {unknown[0]}; there are {', '.join(CASES)}")
    print("| case | ranks | changes | measured MB | estimated MB | estimated / measured | at |\n|" + "---|" * 7)
    ratios = []
    for name in args.cases or CASES:
        world, changes = CASES[name]
        found = [compare(world, case_config(changes)) for _ in range(args.repeat if world > 1 else 1)]
        estimated, measured = min(found, key=lambda pair: pair[1].peak)
        total = estimated.total - estimated.bucket
        ratios.append(total / measured.peak)
        print(f"| {name} | {world} | `{changes}` | {measured.peak / 1e6:.2f} | {total / 1e6:.2f} | {ratios[-1]:.3f} | "
              f"{estimated.moment} |", flush=True)
        if args.cases:
            print("\n".join(memory_lines(estimated)))
    print(f"\n{len(ratios)} cases, estimated / measured {min(ratios):.3f} to {max(ratios):.3f}")


if __name__ == "__main__":
    main()
