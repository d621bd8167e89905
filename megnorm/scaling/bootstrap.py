"""How sure a fit is: refits on runs drawn anew from those at hand, and what to refuse before."""

import numpy as np

from megnorm.scaling.approaches import SAME_SIZE, distinct
from megnorm.scaling.errors import ScalingError
from megnorm.scaling.laws import DELTA, Fit, Form, Points, refit

LEVEL = 0.95
MIN_SPREAD = 0.1  # of log D at equal N, root mean square: below it N and D can't be told apart
SAME_RATIO = 2.0
MAX_SLOPE = 1e-3


def check_data(form: Form, points: Points, who: str) -> None:
    """Raise ScalingError when the runs can't carry a fit of the form, with the reason and what would help."""
    if form.name == "power":
        ratio = np.exp(np.ptp(points.d - points.n)) if len(points) else 1.0
        if ratio > SAME_RATIO:
            raise ScalingError(
                f"{who}: tokens per parameter differ {ratio:.1f} times, and a law of compute alone needs "
                "one ratio: use --form chinchilla"
            )
        if len(points) < 4 or distinct(points.c, SAME_SIZE) < 4:
            raise ScalingError(
                f"{who}: {distinct(points.c, SAME_SIZE)} budgets of compute can't carry the "
                f"{form.parameters} parameters of {form.formula}: at least 4 are needed"
            )
        return
    sizes, budgets = distinct(points.n, SAME_SIZE), distinct(points.d, SAME_SIZE)
    what = f"can't carry {form.formula}"
    if sizes < 3:
        raise ScalingError(
            f"{who}: {sizes} size{'s' * (sizes != 1)} of model {what}: at least 3 are needed (sizes within "
            "5 % count as one); add sizes"
        )
    if budgets < 3:
        raise ScalingError(
            f"{who}: {budgets} number{'s' * (budgets != 1)} of tokens {what}: at least 3 are needed; add token budgets"
        )
    if len(points) <= form.parameters:
        raise ScalingError(
            f"{who}: {len(points)} runs {what}: its {form.parameters} parameters need at least {form.parameters + 1}"
        )
    line = np.polyfit(points.n, points.d, 1)
    if np.std(points.d - np.polyval(line, points.n)) < MIN_SPREAD:
        ratios = np.exp(points.d - points.n)
        raise ScalingError(
            f"{who}: D follows from N (tokens per parameter {ratios.min():.3g} to {ratios.max():.3g}, one "
            f"curve), so the effects of the two can't be told apart and the runs {what}: add runs with "
            "other ratios at the same sizes, or use --form power"
        )


def check_fit(fit: Fit, who: str) -> None:
    """Raise ScalingError when the minimiser did not arrive."""
    if fit.slope > MAX_SLOPE:
        raise ScalingError(
            f"{who}: the fit of {fit.form.formula} did not converge (relative gradient {fit.slope:.1e}): "
            "the losses don't follow such a law, or hold gross errors"
        )


def resamplings(form: Form, points: Points, draws: int, seed: int = 0) -> list[np.ndarray]:
    """Draws of runs with replacement, each an index [n]; draws that can't carry the form are drawn again.

    Whole runs are drawn, not residuals: measured on planted laws, intervals from residuals held the truth in
    85 to 93 % of cases where 95 % were meant, those from runs in 95 to 100 %.
    """
    generator = np.random.default_rng(seed)
    least = min(form.parameters, len(points) - 1)
    kept: list[np.ndarray] = []
    for _ in range(50 * draws):
        index = generator.integers(0, len(points), len(points))
        if len(np.unique(index)) >= least and _carries(form, points.take(index)):
            kept.append(index)
        if len(kept) == draws:
            break
    return kept


def bootstrap(fit: Fit, points: Points, draws: list[np.ndarray], delta: float = DELTA) -> list[Fit]:
    """A refit for each draw of runs. What such intervals don't hold: that the law itself may be wrong."""
    return [refit(fit, points.take(index), delta) for index in draws]


def _carries(form: Form, points: Points) -> bool:
    try:
        check_data(form, points, "draw")
    except ScalingError:
        return False
    return True


def interval(values: list[float] | np.ndarray, level: float = LEVEL) -> tuple[float, float]:
    """The middle ``level`` of the values."""
    low, high = np.quantile(np.asarray(values, float), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
