"""What ``megnorm plan`` prints: parameters, FLOPs, memory by part, layouts that fit and why others don't."""

import re
from collections import Counter

from megnorm.config import Config, ConfigError
from megnorm.plan.estimate import StepTime
from megnorm.plan.flops import flops_per_token
from megnorm.plan.hardware import Hardware
from megnorm.plan.layout import check_layout, make_layout
from megnorm.plan.layouts import USABLE, Candidate, Layouts
from megnorm.plan.memory import Memory, worst_rank
from megnorm.plan.parameters import parameter_table

GIB = 2**30
WORDS = {
    "weights": "weights", "gradients": "gradients", "optimizer": "masters and moments",
    "activations": "activations", "logits": "logits, cross entropy", "gathered": "gathered weights (ZeRO 3)",
    "bucket": "DeepSpeed's reduce bucket",
}


def plan_page(config: Config, found: Layouts, gpus: int, hardware: Hardware, top: int) -> list[str]:
    """All lines. top: how many layouts are shown; each with its fastest micro batch."""
    return [*_model(config), "", *_own_layout(config, gpus, hardware), "", *_layouts(found, gpus, hardware, top), "",
            *_others(found, hardware, top)]


def memory_lines(memory: Memory) -> list[str]:
    """Parts in GiB, and when the peak is."""
    parts = [(WORDS[part], getattr(memory, part)) for part in Memory.PARTS if getattr(memory, part)]
    width = max(len(name) for name, _ in parts)
    lines = [f"  {name:<{width}}  {size_text(size):>10}" for name, size in parts]
    return [*lines, f"  {'peak':<{width}}  {size_text(memory.total):>10}, at: {memory.moment}, stage {memory.stage}"]


def size_text(size: float) -> str:
    """Bytes as "34.40 GiB", or "8.1 MiB" below 1 GiB."""
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / 2**20:.1f} MiB"


def _model(config: Config) -> list[str]:
    table = parameter_table(config)
    width = max(len(f"{number:,}") for _, number, _ in table)
    flops, tokens = flops_per_token(config), config.total_steps * config.tokens_per_step
    return ["parameters",
            *(f"  {part:<14}{number:>{width},}  {source}".rstrip() for part, number, source in table),
            f"FLOPs a token   6 N = {flops.matmul:,}",
            f"                {flops.formula}",
            f"                ({flops.legend})",
            f"the run         {config.total_steps:,} steps of {config.tokens_per_step:,} tokens: "
            f"{flops.matmul * tokens:.3g} FLOPs by 6 N, {flops.total * tokens:.3g} with attention"]


def _own_layout(config: Config, gpus: int, hardware: Hardware) -> list[str]:
    """Memory of the layout that the configuration names."""
    try:
        layout = make_layout(config, gpus)
        check_layout(config, layout)
    except ConfigError as error:
        return [f"the configuration's own layout on {gpus} devices: {error}"]
    lines = memory_lines(worst_rank(config, layout, hardware.device))
    return [f"memory of the worst rank of the configuration's own layout: {layout}, ZeRO "
            f"{config.parallel.zero_stage}, micro batch {config.train.micro_batch}", *lines]


def _layouts(found: Layouts, gpus: int, hardware: Hardware, top: int) -> list[str]:
    usable = hardware.memory * (USABLE if hardware.device == "cuda" else 1)
    lines = [f"{gpus} x {hardware.name}, {hardware.memory:.4g} GiB ({usable:.4g} to be filled): "
             f"{len(found.fitting):,} of {found.count:,} layouts with their micro batches fit; the fastest by the "
             "estimate, each with its best micro batch:"]
    best = _best_micro_batches(found.fitting)[:top]
    if not best:
        return [*lines, "  none"]
    rows = [("step", "MFU", "memory", "mostly", "overrides")]
    rows += [(f"{c.time.total:.3g} s", f"{100 * c.time.mfu:.0f}%", size_text(c.memory.total), _mostly(c.time),
              c.overrides) for c in best]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines += ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) + f"  {row[4]}"
              for row in rows]
    return [*lines, "memory of the worst rank of the first:", *memory_lines(best[0].memory)]


def _best_micro_batches(candidates: list[Candidate]) -> list[Candidate]:
    """The first for each layout; they are sorted."""
    best: dict[str, Candidate] = {}
    for candidate in candidates:
        best.setdefault(candidate.overrides.rpartition(" ")[0], candidate)
    return list(best.values())


def _mostly(time: StepTime) -> str:
    """The two largest parts."""
    parts = sorted(StepTime.PARTS, key=lambda part: -getattr(time, part))[:2]
    return ", ".join(f"{part} {100 * getattr(time, part) / time.total:.0f}%" for part in parts
                     if getattr(time, part) > 0.005 * time.total)


def _others(found: Layouts, hardware: Hardware, top: int) -> list[str]:
    lines = []
    if found.too_large:
        nearest = found.too_large[0]
        largest = Counter(max(Memory.PARTS, key=lambda part: getattr(c.memory, part)) for c in found.too_large)
        what = ", ".join(f"{WORDS[part]} in {number:,}" for part, number in largest.most_common(3))
        lines.append(f"{len(found.too_large):,} need too much memory (the largest part: {what}); the nearest needs "
                     f"{size_text(nearest.memory.total)}: {nearest.overrides}")
    if found.refused:
        lines.append(f"{sum(found.refused.values()):,} can't be; of each kind of reason one:")
        reasons = _kinds(found.refused)
        lines += [f"  {number:6,}  {reason}" for reason, number in reasons[:top]]
        if reasons[top:]:
            lines.append(f"  {sum(n for _, n in reasons[top:]):6,}  for {len(reasons) - top} other reasons (--top)")
    return lines


def _kinds(reasons: Counter) -> list[tuple[str, int]]:
    """Reasons that differ only in their numbers under one of them, most frequent first."""
    kinds: dict[str, tuple[str, int]] = {}
    for reason, number in reasons.most_common():
        kind = re.sub(r"[0-9, ]+", "", reason)
        first, sum_so_far = kinds.get(kind, (reason, 0))
        kinds[kind] = first, sum_so_far + number
    return sorted(kinds.values(), key=lambda item: -item[1])
