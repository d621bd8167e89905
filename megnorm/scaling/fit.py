"""The command ``megnorm fit``: laws of all schemes, how sure they are, what they say. Imports no torch."""

from dataclasses import asdict
from typing import Any

import numpy as np

from megnorm.scaling.approaches import envelope, isoflop
from megnorm.scaling.bootstrap import bootstrap, check_data, check_fit, interval, resamplings
from megnorm.scaling.compare import compare
from megnorm.scaling.errors import ScalingError
from megnorm.scaling.laws import FORMS, Fit, Form, Points, few_starts, fit_law, one_thread
from megnorm.scaling.optimum import optimum
from megnorm.scaling.results import Result, by_scheme, points_of

COUNTS = {
    "total": "N with embeddings",
    "non_embedding": "N without embeddings",
    "active": "active N (with embeddings, without the experts that a token doesn't choose)",
}
DRAWS = 200


def analyse(
    results: list[Result],
    form_name: str = "chinchilla",
    budgets: list[float] | None = None,
    draws: int = DRAWS,
    notes: list[str] | None = None,
) -> dict[str, Any]:
    """Everything about the results as JSON values: laws of each scheme for each count of N, comparisons.

    budgets: FLOPs at which optimum and comparison are given; by default 1, 10, 100 times those of the largest
    run. draws: of the bootstrap. notes: what was left out of the results.
    Raises ScalingError when the data can't carry the fit.
    """
    if form_name not in FORMS:
        raise ScalingError(f"--form {form_name}: choose one of {', '.join(FORMS)}")
    if not results:
        raise ScalingError("no finished run with a finite loss" + "".join(f"; {note}" for note in notes or []))
    if draws < 20:
        raise ScalingError(f"--draws {draws}: at least 20 are needed for an interval")
    form, schemes = FORMS[form_name], by_scheme(results)
    largest = max(run.flops for run in results)
    budgets = budgets or [largest, 10 * largest, 100 * largest]
    if min(budgets) <= 0:
        raise ScalingError(f"--budget {min(budgets):g}: FLOPs must be above 0")
    counts = ["total"] + ["non_embedding"] * all(run.non_embedding for run in results)
    notes = list(notes or [])
    if len(counts) == 1:
        notes.append("the results have no column non_embedding, so N with embeddings is all there is")
    # Where there are experts, only the active parameters stand for compute.
    sparse = any(run.computing != run.parameters for run in results)
    counts += ["active"] * (sparse and all(run.active for run in results))
    ratio = np.array([run.flops / (6 * run.computing * run.tokens) for run in results])
    notes.append(
        f"the runs' FLOPs are {ratio.min():.2f} to {ratio.max():.2f} times 6 N D "
        f"({'active N' if sparse else 'N with embeddings'}); "
        "compute-optimal N and D are for C = 6 N D"
    )
    with one_thread():
        fitted = {
            scheme: {
                count: fit_scheme(form, runs, count, f"{scheme}, {COUNTS[count]}", budgets, draws) for count in counts
            }
            for scheme, runs in schemes.items()
        }
        comparisons = compare(schemes, form, counts[-1], budgets, draws)
    return {
        "form": form.name,
        "formula": form.formula,
        "counts": {count: COUNTS[count] for count in counts},
        "notes": notes,
        "budgets": budgets,
        "runs": len(results),
        "results": [asdict(run) for run in results],
        "schemes": fitted,
        "comparisons": comparisons,
        "compared_with": COUNTS[counts[-1]],
    }


def fit_scheme(
    form: Form, runs: list[Result], count: str, who: str, budgets: list[float], draws: int
) -> dict[str, Any]:
    """One law with intervals, residuals, optima, the largest run held out, and the alternatives."""
    points = points_of(runs, count)
    check_data(form, points, who)
    fit = fit_law(form, points)
    check_fit(fit, who)
    refits = bootstrap(fit, points, resamplings(form, points, draws))
    named = [one.constants for one in refits]
    residuals = points.loss - fit.log_loss(points.n, points.d, points.c)
    return {
        "runs": len(runs),
        "constants": {
            name: {"value": value, "interval": interval([one[name] for one in named])}
            for name, value in fit.constants.items()
        },
        "theta": [float(x) for x in fit.theta],
        "means": list(fit.means),
        "refits": [[float(x) for x in one.theta] for one in refits],
        "starts": fit.starts,
        "agreeing": fit.agreeing,
        "slope": fit.slope,
        "value": fit.value,
        "warnings": _warnings(form, fit, points),
        "residuals": [float(x) for x in residuals],
        "typical_residual": float(np.median(np.abs(residuals))),
        "optima": [_optimum_row(fit, refits, budget) for budget in budgets],
        "held_out": held_out(form, runs, count, draws),
        "isoflop": asdict(isoflop(points)),
        "envelope": asdict(envelope(points)),
    }


def held_out(form: Form, runs: list[Result], count: str, draws: int) -> dict[str, Any]:
    """The law fitted without the run of most FLOPs, and what it says of that run."""
    last = max(range(len(runs)), key=lambda i: runs[i].flops)
    rest = points_of([run for i, run in enumerate(runs) if i != last], count)
    held = points_of([runs[last]], count)
    answer = {"run": runs[last].name, "loss": runs[last].loss}
    try:
        check_data(form, rest, "without it")
    except ScalingError as error:
        return {**answer, "reason": str(error)}
    fit = fit_law(form, rest, few_starts(form, rest))
    spread = rest.loss - fit.log_loss(rest.n, rest.d, rest.c)
    generator = np.random.default_rng(1)
    predicted = [
        float(np.exp(one.log_loss(held.n, held.d, held.c)[0] + generator.choice(spread)))
        for one in bootstrap(fit, rest, resamplings(form, rest, draws))
    ]
    value = float(np.exp(fit.log_loss(held.n, held.d, held.c)[0]))
    low, high = interval(predicted)
    return {
        **answer,
        "predicted": value,
        "interval": (low, high),
        "inside": low <= runs[last].loss <= high,
        "error": value - runs[last].loss,
    }


def law_of(analysis: dict[str, Any], scheme: str, count: str, theta: list[float] | None = None) -> Fit:
    """The law of an analysis again (or one of its refits), to draw it."""
    saved = analysis["schemes"][scheme][count]
    return Fit(
        FORMS[analysis["form"]],
        np.array(theta or saved["theta"]),
        tuple(saved["means"]),
        saved["value"],
        saved["starts"],
        saved["agreeing"],
        saved["slope"],
    )


def _optimum_row(fit: Fit, refits: list[Fit], budget: float) -> dict[str, Any]:
    best, drawn = optimum(fit, budget), [optimum(one, budget) for one in refits]
    row: dict[str, Any] = {"budget": budget}
    for name in ("parameters", "tokens", "loss"):
        row[name] = {
            "value": getattr(best, name),
            "interval": interval([getattr(one, name) for one in drawn]),
        }
    return row


def _warnings(form: Form, fit: Fit, points: Points) -> list[str]:
    warnings = []
    if fit.at_bound:
        warnings.append(f"{', '.join(fit.at_bound)} at the edge of what is searched: the runs don't determine it")
    if len(points) < 2 * form.parameters:
        warnings.append(f"{len(points)} runs for {form.parameters} parameters: intervals from so few are rough")
    if fit.agreeing < fit.starts / 4:
        warnings.append(f"only {fit.agreeing} of {fit.starts} starts ended at the best minimum")
    return warnings
