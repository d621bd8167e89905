"""What a blend will take from each source, in words, and whether it can."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megnorm.data.errors import DataError


@dataclass(frozen=True)
class SourcePlan:
    """One source of a split: `samples` drawn in the whole run, `per_epoch` there are, `weight` as given."""

    name: str
    weight: float
    samples: int
    per_epoch: int

    @property
    def epochs(self) -> float:
        """How many times the source is gone through."""
        return self.samples / self.per_epoch


def epoch_shares(
    names: Sequence[str], epochs: Sequence[float], per_epoch: Sequence[int], samples: int
) -> list[float]:
    """Weights of sources that are to be gone through `epochs` times each in a run of `samples` samples.

    Raises DataError when the run is longer than that; a shorter one takes the same share of each.
    """
    shares = [times * count for times, count in zip(epochs, per_epoch, strict=True)]
    if samples > sum(shares):
        parts = ", ".join(
            f"{times:g} x {count:,} of {name}"
            for name, times, count in zip(names, epochs, per_epoch, strict=True)
        )
        raise DataError(
            f"the run takes {samples:,} samples, but the epochs of data.blend=epochs give "
            f"{int(sum(shares)):,} ({parts}); give more epochs, fewer steps, or data.blend=tokens"
        )
    return shares


def check_plan(plans: Sequence[SourcePlan], max_epochs: float | None) -> None:
    """Raises DataError when a source would be repeated more often than allowed."""
    for plan in plans:
        if max_epochs is not None and plan.epochs > max_epochs:
            raise DataError(
                f"{plan.name}: weight {plan.weight:g} takes {plan.samples:,} samples = "
                f"{plan.epochs:.2f} epochs of {plan.per_epoch:,}, above "
                f"data.max_epochs={max_epochs:g}; give it a smaller weight, fewer steps, or more epochs"
            )


def plan_lines(split: str, plans: Sequence[SourcePlan], sequence_length: int) -> list[str]:
    """The plan of a split as a table in text."""
    width = max(len(plan.name) for plan in plans)
    total = sum(plan.samples for plan in plans)
    lines = [f"data of {split}: {total:,} samples, {total * sequence_length:,} tokens"]
    for plan in plans:
        lines.append(
            f"  {plan.name:<{width}}  {plan.samples / max(total, 1):6.1%}  "
            f"{plan.samples * sequence_length:>15,} tokens  {plan.epochs:8.2f} epochs of "
            f"{plan.per_epoch * sequence_length:,}"
        )
    return lines
