"""The best N and D for a budget of compute, C = 6 N D."""

from typing import NamedTuple

import numpy as np

from megnorm.scaling.laws import Fit


class Optimum(NamedTuple):
    """Compute-optimal parameters and tokens for ``budget`` FLOPs, and the loss there."""

    budget: float
    parameters: float
    tokens: float
    loss: float


def optimum(fit: Fit, budget: float) -> Optimum:
    """Where A / N^alpha + B / D^beta is least at 6 N D = budget; for ``power``, D / N is that of the runs."""
    compute = np.log(budget / 6)
    if fit.form.name == "power":
        log_n = (compute + fit.means[0] - fit.means[1]) / 2
    else:
        log_a, log_b, alpha, beta = _terms(fit)
        log_n = (np.log(alpha / beta) + log_a - log_b + beta * compute) / (alpha + beta)
    with np.errstate(over="ignore"):  # a refit of too few runs may put it anywhere
        loss = np.exp(fit.log_loss(log_n, compute - log_n, np.log(budget))[0])
        return Optimum(budget, *(float(value) for value in (np.exp(log_n), np.exp(compute - log_n), loss)))


def _terms(fit: Fit) -> tuple[float, float, float, float]:
    """log A, log B, alpha, beta of the two terms that fall with N and D."""
    if fit.form.name == "chinchilla":
        _, a, b, alpha, beta = fit.theta
        return a + alpha * fit.means[0], b + beta * fit.means[1], alpha, beta
    u, v, alpha_n, alpha_d = fit.theta
    ratio = alpha_n / alpha_d
    return u / alpha_d + ratio * fit.means[0], v / alpha_d + fit.means[1], ratio, 1.0
