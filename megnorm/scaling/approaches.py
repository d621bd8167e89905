"""Two other ways to the compute-optimal size, shown beside a fitted law: IsoFLOP parabolas and the envelope.

Both are biased in known ways, so that they check a fit and don't replace it.
"""

from dataclasses import dataclass, field

import numpy as np

from megnorm.scaling.laws import Points

ISOFLOP_CAVEAT = (
    "a parabola in log N is right only at the minimum of a symmetric valley: wide or off-centre grids of "
    "sizes shift the optimum (by 1 to 14 % for grids 4x to 64x to each side) and can bend the exponent"
)
ENVELOPE_CAVEAT = (
    "the best runs of a coarse grid lie on the grid's sizes, not on the optimum between them, and the "
    "largest size bends the envelope's end"
)
SAME_BUDGET = 0.1  # runs whose log FLOPs differ by less belong to one budget
SAME_SIZE = 0.05


@dataclass(frozen=True)
class Frontier:
    """Optimal N by compute, N ~ C^exponent; ``budgets`` and ``sizes`` are what the exponent is drawn through.
    reason: why there is none."""

    exponent: float | None
    caveat: str
    reason: str = ""
    budgets: list[float] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)


def isoflop(points: Points) -> Frontier:
    """Approach 2 of arXiv:2203.15556: a parabola of loss in log N at each budget, a line through minima."""
    budgets, sizes, rejected = [], [], []
    for group in budget_groups(points.c):
        n, c = points.n[group], float(points.c[group].mean())
        if distinct(n, SAME_SIZE) < 3:
            continue
        curve, slope, _ = np.polyfit(n, np.exp(points.loss[group]), 2)
        best = -slope / (2 * curve)
        if curve <= 0 or not n.min() <= best <= n.max():
            rejected.append(f"{np.exp(c):.2g}")
            continue
        budgets.append(c)
        sizes.append(best)
    left_out = f"; no minimum within the sizes at {', '.join(rejected)} FLOPs" if rejected else ""
    if len(budgets) < 2:
        return Frontier(
            None,
            ISOFLOP_CAVEAT,
            f"needs 2 budgets with 3 sizes of equal FLOPs each, whose loss has a "
            f"minimum within them; there are {len(budgets)}{left_out}",
        )
    return _frontier(budgets, sizes, ISOFLOP_CAVEAT + left_out)


def envelope(points: Points) -> Frontier:
    """Approach 1, on finished runs: a line, log N over log C, through those that no cheaper run beats."""
    order = np.lexsort((points.loss, points.c))
    lowest = np.minimum.accumulate(points.loss[order])
    best = order[np.flatnonzero(np.diff(lowest, prepend=np.inf) < 0)]
    if len(best) < 4 or distinct(points.n[best], SAME_SIZE) < 3:
        return Frontier(
            None,
            ENVELOPE_CAVEAT,
            f"needs 4 best runs of 3 sizes; there are {len(best)} of {distinct(points.n[best], SAME_SIZE)}",
        )
    return _frontier(points.c[best], points.n[best], ENVELOPE_CAVEAT)


def budget_groups(c: np.ndarray) -> list[np.ndarray]:
    """Indices of runs of about equal FLOPs: neighbours in log C closer than SAME_BUDGET."""
    order = np.argsort(c, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(c[order]) > SAME_BUDGET) + 1)


def distinct(values: np.ndarray, gap: float) -> int:
    """How many values there are, where those closer than ``gap`` are one."""
    return 1 + int((np.diff(np.sort(values)) > gap).sum()) if len(values) else 0


def _frontier(budgets: np.ndarray | list, sizes: np.ndarray | list, caveat: str) -> Frontier:
    exponent = float(np.polyfit(budgets, sizes, 1)[0])
    return Frontier(exponent, caveat, "", [float(x) for x in np.exp(budgets)], [float(x) for x in np.exp(sizes)])
