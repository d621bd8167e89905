"""Forms of scaling laws, and their fit: the sum of Huber losses of log residuals, many starts, L-BFGS.

The sum matters: scipy's L-BFGS-B stops on absolute changes once a value is below 1, so that a mean over 200
runs ends early and far from the minimum (arXiv:2404.10102 on arXiv:2203.15556). Here each round of the
minimiser sees the objective divided by its value at the round's start, and rounds go on until one brings
nothing more: a constant factor on the objective, or other units of N, D and C, change nothing.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import product

import numpy as np

from megnorm.scaling.errors import ScalingError

DELTA = 1e-3  # of the Huber loss, on differences of log losses (arXiv:2203.15556, appendix D.3)
ALMOST_ZERO = 1e-22  # of a mean Huber loss: noise-free data, nothing left to fit
Objective = Callable[[np.ndarray], tuple[float, np.ndarray]]


@dataclass(frozen=True)
class Points:
    """Runs to fit: logs of N (parameters), D (tokens), C (FLOPs) and of the loss, each [n]."""

    n: np.ndarray
    d: np.ndarray
    c: np.ndarray
    loss: np.ndarray

    def take(self, index: np.ndarray) -> "Points":
        """Those runs, in that order."""
        return Points(self.n[index], self.d[index], self.c[index], self.loss[index])

    def __len__(self) -> int:
        return len(self.loss)


@dataclass(frozen=True)
class Form:
    """A law with parameters theta. ``log_loss(theta, n, d, c)``: the log of the loss [n] and its derivatives
    [n, parameters]; exponents: which parameters are such; ``named``: the constants of the formula."""

    name: str
    formula: str
    parameters: int
    exponents: tuple[int, ...]
    log_loss: Callable
    starts: Callable
    named: Callable


def _chinchilla(theta: np.ndarray, n: np.ndarray, d: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    e, a, b, alpha, beta = theta
    terms = np.stack([np.full_like(n, e), a - alpha * n, b - beta * d], axis=1)
    total, share = _log_sum(terms)
    return total, np.column_stack([share, -share[:, 1] * n, -share[:, 2] * d])


def _power(theta: np.ndarray, n: np.ndarray, d: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    e, a, alpha = theta
    total, share = _log_sum(np.stack([np.full_like(c, e), a - alpha * c], axis=1))
    return total, np.column_stack([share, -share[:, 1] * c])


def _kaplan(theta: np.ndarray, n: np.ndarray, d: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    u, v, alpha_n, alpha_d = theta
    x, y = (u - alpha_n * n) / alpha_d, v / alpha_d - d
    total, share = _log_sum(np.stack([x, y], axis=1))
    by_alpha_d = total - share[:, 0] * x - share[:, 1] * v / alpha_d
    return alpha_d * total, np.column_stack([share, -share[:, 0] * n, by_alpha_d])


def _log_sum(terms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Log of the sum of exponentials over the last axis [n], and each term's share of it [n, terms]."""
    top = terms.max(axis=1, keepdims=True)
    exps = np.exp(terms - top)
    sums = exps.sum(axis=1, keepdims=True)
    return (top + np.log(sums))[:, 0], exps / sums


def _chinchilla_starts(loss: np.ndarray) -> list[tuple[float, ...]]:
    low, middle = np.exp(loss.min()), np.exp(np.median(loss))
    grid = product((0.1, 0.4, 0.6, 0.8, 0.95), (0.2, 0.8), (0.15, 0.35, 0.7), (0.15, 0.35, 0.7))
    return [
        (
            np.log(share * low),
            np.log(part * (middle - share * low)),
            np.log((1 - part) * (middle - share * low)),
            alpha,
            beta,
        )
        for share, part, alpha, beta in grid
    ]


def _power_starts(loss: np.ndarray) -> list[tuple[float, ...]]:
    low, middle = np.exp(loss.min()), np.exp(np.median(loss))
    return [
        (np.log(share * low), np.log(middle - share * low), alpha)
        for share, alpha in product((0.05, 0.2, 0.4, 0.6, 0.8, 0.95), (0.02, 0.05, 0.1, 0.2, 0.4, 0.8))
    ]


def _kaplan_starts(loss: np.ndarray) -> list[tuple[float, ...]]:
    middle = np.median(loss)
    return [
        (middle + one, middle + other, alpha_n, alpha_d)
        for one, other, alpha_n, alpha_d in product(
            (-1.0, -0.3, -0.05), (-1.0, -0.3, -0.05), (0.03, 0.08, 0.2, 0.5), (0.03, 0.08, 0.2, 0.5)
        )
    ]


def _chinchilla_named(theta: np.ndarray, means: tuple[float, float, float]) -> dict[str, float]:
    e, a, b, alpha, beta = (float(value) for value in theta)
    return {
        "E": np.exp(e),
        "A": np.exp(a + alpha * means[0]),
        "B": np.exp(b + beta * means[1]),
        "alpha": alpha,
        "beta": beta,
        "a": beta / (alpha + beta),
    }


def _power_named(theta: np.ndarray, means: tuple[float, float, float]) -> dict[str, float]:
    e, a, alpha = (float(value) for value in theta)
    return {"E": np.exp(e), "A": np.exp(a + alpha * means[2]), "alpha": alpha}


def _kaplan_named(theta: np.ndarray, means: tuple[float, float, float]) -> dict[str, float]:
    u, v, alpha_n, alpha_d = (float(value) for value in theta)
    return {
        "N_c": np.exp(u / alpha_n + means[0]),
        "D_c": np.exp(v / alpha_d + means[1]),
        "alpha_N": alpha_n,
        "alpha_D": alpha_d,
        "a": alpha_d / (alpha_n + alpha_d),
    }


FORMS = {
    "chinchilla": Form(
        "chinchilla",
        "L = E + A / N^alpha + B / D^beta",
        5,
        (3, 4),
        _chinchilla,
        _chinchilla_starts,
        _chinchilla_named,
    ),
    "power": Form("power", "L = E + A / C^alpha", 3, (2,), _power, _power_starts, _power_named),
    "kaplan": Form(
        "kaplan",
        "L = ((N_c / N)^(alpha_N / alpha_D) + D_c / D)^alpha_D",
        4,
        (2, 3),
        _kaplan,
        _kaplan_starts,
        _kaplan_named,
    ),
}
EXPONENT_BOUNDS = (1e-3, 4.0)


@dataclass(frozen=True)
class Fit:
    """A fitted law. theta: parameters around ``means`` of the logs; value: the sum of Huber losses; starts,
    agreeing: minimisations made, and those that ended within 0.1 % of the best; slope: relative gradient;
    at_bound: parameters at the edge of what is searched."""

    form: Form
    theta: np.ndarray
    means: tuple[float, float, float]
    value: float
    starts: int
    agreeing: int
    slope: float
    at_bound: tuple[str, ...] = ()

    @property
    def constants(self) -> dict[str, float]:
        """The constants of the formula, in the units of the runs; ``a``: the optimal N grows as C^a."""
        return {name: float(value) for name, value in self.form.named(self.theta, self.means).items()}

    def log_loss(self, n: np.ndarray, d: np.ndarray, c: np.ndarray) -> np.ndarray:
        """Log of the law's loss at logs of N, D and C."""
        n, d, c = (np.atleast_1d(values) - mean for values, mean in zip((n, d, c), self.means, strict=True))
        return self.form.log_loss(self.theta, *np.broadcast_arrays(n, d, c))[0]


def huber(residual: np.ndarray, delta: float = DELTA) -> tuple[np.ndarray, np.ndarray]:
    """Huber loss of each residual, and its derivative."""
    slope = np.clip(residual, -delta, delta)
    return slope * (residual - slope / 2), slope


def objective_of(form: Form, points: Points, means: tuple[float, float, float], delta: float = DELTA) -> Objective:
    """The sum over runs of Huber losses of log residuals as a function of theta, with its gradient."""
    at = [values - mean for values, mean in zip((points.n, points.d, points.c), means, strict=True)]

    def objective(theta: np.ndarray) -> tuple[float, np.ndarray]:
        predicted, jacobian = form.log_loss(theta, *at)
        value, slope = huber(predicted - points.loss, delta)
        return float(value.sum()), slope @ jacobian

    return objective


def one_thread() -> AbstractContextManager:
    """The fits' matrices are tiny: threads of BLAS would only wait for each other, and fifteen times as long (measured)
    where other work runs. Raises ScalingError."""
    try:
        import scipy.optimize  # noqa: F401  brings the BLAS that is limited
        from threadpoolctl import threadpool_limits
    except ImportError as error:
        raise ScalingError(f'fits need {error.name}: pip install "megnorm[plot]"') from None
    return threadpool_limits(1, user_api="blas")


def minimise(
    objective: Objective, start: np.ndarray, bounds: list, floor: float = 0.0, tolerance: float = 1e-7
) -> tuple[np.ndarray, float]:
    """The minimum reached from ``start`` and its value, the same for any constant factor on the objective.

    floor: a value that counts as zero; tolerance: rounds go on while one lowers the value by a larger share.
    """
    from scipy.optimize import minimize

    theta = np.clip(np.asarray(start, float), *np.array(bounds).T)
    value = objective(theta)[0]
    for _ in range(30):
        if value <= floor:
            break
        scale = value
        done = minimize(
            lambda x, scale=scale: tuple(part / scale for part in objective(x)),
            theta,
            jac=True,
            method="L-BFGS-B",
            bounds=bounds,
            options={"ftol": 1e-6 * tolerance, "gtol": 1e-12, "maxiter": 3000, "maxcor": 20},
        )
        if not done.fun < 1.0:
            break
        theta, value = done.x, float(done.fun) * scale
        if done.fun > 1 - tolerance:
            break
    return theta, value


def bounds_of(form: Form, loss: np.ndarray) -> list[tuple[float, float]]:
    """Exponents stand between 0.001 and 4, the irreducible loss between 0.001 and the least loss seen."""
    bounds = [(-np.inf, np.inf)] * form.parameters
    if form.name != "kaplan":
        bounds[0] = (np.log(1e-3), float(loss.min()))
    for place in form.exponents:
        bounds[place] = EXPONENT_BOUNDS
    return [(max(low, -100.0), min(high, 100.0)) for low, high in bounds]


def fit_law(form: Form, points: Points, starts: list | None = None, delta: float = DELTA) -> Fit:
    """Fit a law to runs from a grid of starts (or from given ones, in the parameters of ``Fit.theta``)."""
    means = (float(points.n.mean()), float(points.d.mean()), float(points.c.mean()))
    objective, bounds = objective_of(form, points, means, delta), bounds_of(form, points.loss)
    floor = ALMOST_ZERO * len(points)
    ends = [minimise(objective, start, bounds, floor) for start in starts or form.starts(points.loss)]
    theta, value = min(ends, key=lambda end: end[1])
    agreeing = sum(end[1] <= value * 1.001 + floor for end in ends)
    return Fit(
        form,
        theta,
        means,
        value,
        len(ends),
        agreeing,
        _slope(form, points, means, theta, bounds, delta),
        _at_bounds(form, theta, bounds),
    )


def few_starts(form: Form, points: Points) -> list[tuple[float, ...]]:
    """Every ninth start of the grid, for fits beside one that came from all of them."""
    return form.starts(points.loss)[::9]


def refit(fit: Fit, points: Points, delta: float = DELTA) -> Fit:
    """The same form on other data of the same kind (bootstrap), from the minimum of ``fit``."""
    objective, bounds = objective_of(fit.form, points, fit.means, delta), bounds_of(fit.form, points.loss)
    theta, value = minimise(objective, fit.theta, bounds, ALMOST_ZERO * len(points), tolerance=1e-4)
    return Fit(fit.form, theta, fit.means, value, 1, 1, 0.0, ())


def _slope(form: Form, points: Points, means: tuple, theta: np.ndarray, bounds: list, delta: float) -> float:
    """Largest relative gradient: |sum of the runs' pulls| over their root sum of squares; 0 at a bound."""
    at = [values - mean for values, mean in zip((points.n, points.d, points.c), means, strict=True)]
    predicted, jacobian = form.log_loss(theta, *at)
    value, slope = huber(predicted - points.loss, delta)
    if value.sum() <= ALMOST_ZERO * len(points):
        return 0.0
    pulls = slope[:, None] * jacobian
    free = [low < x < high for x, (low, high) in zip(theta, bounds, strict=True)]
    share = np.abs(pulls.sum(axis=0)) / np.maximum(np.sqrt((pulls**2).sum(axis=0)), 1e-300)
    return float(np.max(share[free], initial=0.0))


def _at_bounds(form: Form, theta: np.ndarray, bounds: list) -> tuple[str, ...]:
    names = {
        "chinchilla": ("E", "A", "B", "alpha", "beta"),
        "power": ("E", "A", "alpha"),
        "kaplan": ("N_c", "D_c", "alpha_N", "alpha_D"),
    }[form.name]
    return tuple(
        name for name, x, (low, high) in zip(names, theta, bounds, strict=True) if x <= low + 1e-6 or x >= high - 1e-6
    )
