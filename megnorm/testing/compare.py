"""Compare a layout's results with the reference, and name the likely fault when they differ."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from megnorm.plan.layout import Layout
from megnorm.testing.parity import PHASES, gathered


@dataclass(frozen=True)
class Verdict:
    """The largest relative differences of one layout; ``faults``: one line for each measure beyond tolerance."""

    loss: float
    grad_norm: float
    gradient: tuple[float, str]
    weight: tuple[float, str]
    faults: list[str]

    @property
    def agrees(self) -> bool:
        """Whether nothing differs."""
        return not self.faults


def judge(reference: dict[str, dict[str, Any]], ranks: list[dict[str, dict[str, Any]]], layout: Layout) -> Verdict:
    """Compare the ranks' results with the reference's over the phases that the ranks ran, each to its tolerance."""
    faults: list[str] = []
    loss = grad_norm = 0.0
    worst = {"gradient": (0.0, ""), "weight": (0.0, "")}
    for phase in (phase for phase in PHASES if phase.name in ranks[0]):
        expected, got = reference[phase.name], [rank[phase.name] for rank in ranks]
        tolerance = expected["tolerance"]
        for measure in ("losses", "norms", "eval", "routing"):
            difference, values = _numbers(expected[measure], [rank[measure] for rank in got])
            loss = max(loss, difference) if measure in ("losses", "eval") else loss
            grad_norm = max(grad_norm, difference) if measure == "norms" else grad_norm
            if not difference <= tolerance:
                faults.append(f"{phase.name}: {measure} {values}")
        kind = "gradient" if phase.name == "gradient" else "weight"
        try:
            differences = _tensors(expected, got, phase.lr if kind == "gradient" else None)
        except AssertionError as error:
            faults.append(f"{phase.name}: {error}")
            continue
        for name, (difference, ratio) in differences.items():
            worst[kind] = max(worst[kind], (difference, name))
            if not difference <= tolerance:
                hint = f", got/right = {ratio:.4g}{likely_fault(ratio, layout)}" if kind == "gradient" else ""
                faults.append(f"{phase.name}: {name} differs by {difference:.1e}{hint}")
    return Verdict(loss, grad_norm, worst["gradient"], worst["weight"], faults)


def _numbers(expected: Any, got: list[Any]) -> tuple[float, str]:
    """Largest relative difference over ranks and steps, and the pair that shows it."""
    right, found = np.asarray(expected, float), np.asarray(got, float)
    if right.size == 0:  # of routers, in a model without
        return 0.0, ""
    difference = np.abs(found - right) / np.maximum(np.abs(right), 1e-30)
    difference = np.where(np.isnan(difference), math.inf, difference)
    place = rank, step, *_ = np.unravel_index(difference.argmax(), difference.shape)
    return float(difference.max()), f"{found[place]:.7g} on rank {rank}, step {step + 1}; right: {right[place[1:]]:.7g}"


def _tensors(expected: dict, got: list[dict], lr: float | None) -> dict[str, tuple[float, float]]:
    """By name: relative difference (norm of the difference over norm) and ratio got/right; of the weights, or
    of the gradient that moved them by ``lr`` times itself. A gradient below 1/1000 of the largest is measured
    against that floor: it is what cancellation left in fp32. Raises AssertionError for unequal replicas."""
    start, weights = gathered([rank["start"] for rank in got]), gathered([rank["weights"] for rank in got])
    for name in expected["weights"]:
        assert name in weights, f"no rank holds {name}"
        assert np.array_equal(start[name], expected["start"][name]), f"the initial weights of {name} differ"
    pairs = {name: (right, weights[name]) for name, right in expected["weights"].items()}
    if lr is not None:
        pairs = {name: tuple((expected["start"][name] - w) / lr for w in pair) for name, pair in pairs.items()}
    floor = 1e-3 * max(float(np.linalg.norm(right)) for right, _ in pairs.values()) if lr is not None else 1e-30
    differences = {}
    for name, (right, found) in pairs.items():
        size = float(np.linalg.norm(right))
        difference = float(np.linalg.norm(found - right)) / max(size, floor)
        ratio = float(np.vdot(found, right)) / max(size * size, 1e-30)
        differences[name] = (math.inf if math.isnan(difference) else difference, ratio)
    return differences


def likely_fault(ratio: float, layout: Layout) -> str:
    """What a gradient's ratio got/right says, where it is a power of a size of the layout."""
    for axis, what in (("tp", "tensor"), ("dp", "data"), ("pp", "pipeline"), ("ep", "expert")):
        size = getattr(layout, axis)
        if size == 1:
            continue
        for factor, meaning in ((size, f"summed once too often over the {what}-parallel ranks"),
                                (1 / size, f"not summed over the {what}-parallel ranks, or averaged"),
                                (math.sqrt(size), f"scaled by the root of {axis}")):
            if abs(ratio / factor - 1) < 0.02:
                return f" = {_as_text(factor, axis, size)}: {meaning}?"
    if abs(ratio) < 1e-6:
        return ": no gradient at all"
    return ": neither a multiple nor a share; a partial sum over ranks that hold different parts?"


def _as_text(factor: float, axis: str, size: int) -> str:
    return axis if factor == size else f"1/{axis}" if factor == 1 / size else f"sqrt({axis})"
