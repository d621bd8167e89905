"""Which of two schemes is better, and how sure: paired, at the same runs and at equal compute."""

from dataclasses import asdict, dataclass
from itertools import combinations

import numpy as np

from megnorm.scaling.bootstrap import bootstrap, interval, resamplings
from megnorm.scaling.laws import Form, Points, few_starts, fit_law
from megnorm.scaling.optimum import optimum
from megnorm.scaling.results import Result, points_of

SAME_MODEL = 0.05  # norms change a model's N by less


@dataclass(frozen=True)
class Comparison:
    """Scheme ``first`` minus ``second``, in nats per token: below 0 the first is better.

    measured: mean difference over the pairs of runs of the same size and tokens, with its interval. At each
    budget: difference of the two laws' losses at their own optimum, its interval, the winner and the share of
    the draws in which it wins; beyond: the budget over that of the largest run. reason: why there is none.
    """

    first: str
    second: str
    pairs: int
    measured: float | None
    measured_interval: tuple[float, float] | None
    at_budgets: list[dict]
    reason: str = ""


def compare(schemes: dict[str, list[Result]], form: Form, count: str, budgets: list[float], draws: int) -> list[dict]:
    """All pairs of schemes."""
    return [asdict(_pair(one, other, schemes, form, count, budgets, draws)) for one, other in combinations(schemes, 2)]


def matched(first: list[Result], second: list[Result]) -> list[tuple[Result, Result]]:
    """Pairs of the same size (active parameters within 5 %), tokens and seed; each run at most once."""
    free, pairs = list(second), []

    def apart(run: Result, other: Result) -> float:
        return abs(np.log(other.computing / run.computing))

    for run in first:
        same = [
            other
            for other in free
            if other.tokens == run.tokens and other.seed == run.seed and apart(run, other) < SAME_MODEL
        ]
        if same:
            pairs.append((run, min(same, key=lambda other: apart(run, other))))
            free.remove(pairs[-1][1])
    return pairs


def _pair(one: str, other: str, schemes: dict, form: Form, count: str, budgets: list[float], draws: int) -> Comparison:
    pairs = matched(schemes[one], schemes[other])
    if len(pairs) < 3:
        return Comparison(
            one,
            other,
            len(pairs),
            None,
            None,
            [],
            f"{len(pairs)} runs of the same size, tokens and seed; at least 3 are needed",
        )
    sides = [points_of([pair[side] for pair in pairs], count) for side in (0, 1)]
    gaps = np.exp(sides[0].loss) - np.exp(sides[1].loss)
    index = np.random.default_rng(0).integers(0, len(gaps), (2000, len(gaps)))
    measured = interval(gaps[index].mean(axis=1))
    drawn = resamplings(form, sides[0], draws) if len(pairs) > form.parameters else []
    if len(drawn) < draws:
        return Comparison(
            one,
            other,
            len(pairs),
            float(gaps.mean()),
            measured,
            [],
            f"{len(pairs)} pairs can't carry two "
            f"laws of {form.parameters} parameters, so only the measured difference is given",
        )
    return Comparison(
        one,
        other,
        len(pairs),
        float(gaps.mean()),
        measured,
        _at_budgets(one, other, sides, form, budgets, drawn),
    )


def _at_budgets(one: str, other: str, sides: list[Points], form: Form, budgets: list[float], drawn: list) -> list[dict]:
    """Both laws refitted on the same draws of pairs: what the runs share cancels in the difference."""
    fits = [fit_law(form, side, few_starts(form, side)) for side in sides]
    refits = [bootstrap(fit, side, drawn) for fit, side in zip(fits, sides, strict=True)]
    largest, rows = float(np.exp(sides[0].c.max())), []
    for budget in budgets:
        gap = optimum(fits[0], budget).loss - optimum(fits[1], budget).loss
        gaps = np.array([optimum(a, budget).loss - optimum(b, budget).loss for a, b in zip(*refits, strict=True)])
        wins = float((gaps < 0).mean() if gap < 0 else (gaps > 0).mean())
        rows.append(
            {
                "budget": budget,
                "difference": gap,
                "interval": interval(gaps),
                "winner": one if gap < 0 else other,
                "sure": wins,
                "beyond": budget / largest,
            }
        )
    return rows
