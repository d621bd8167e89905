"""The learning rate as a pure function of the step: nothing to save, nothing to restore.

The clock is t = step + 1, the number that the step carries in metrics.jsonl: the first step has t = 1, the
last one t = T, the total. Warm-up ends at t = warmup with exactly the peak, the run at t = T with exactly
min_lr.
Warm-up and decay given in tokens are divided by the tokens of a step and may end between two steps.
"""

import math

from megnorm.config import Config, ConfigError


def learning_rate(config: Config, step: int) -> float:
    """The learning rate of the step with the 0-based number ``step``.

    Warm-up: peak * t / warmup. Then, with x = the share of the way from warm-up's end to T still to go,
    cosine: min + (peak - min) (1 + cos(pi (1 - x))) / 2; linear: min + (peak - min) x; constant: peak;
    wsd: peak, and over the last ``decay`` steps min + (peak - min) (T - t) / decay. Beyond T it stays.
    """
    peak, floor, kind = config.optimizer.lr, config.schedule.min_lr, config.schedule.kind
    warmup, total = warmup_steps(config), config.total_steps
    t = min(step + 1, total)
    if t < warmup:
        return peak * t / warmup
    if kind == "constant":
        return peak
    span = decay_steps(config) if kind == "wsd" else total - warmup
    left = min(1.0, (total - t) / span) if span else 1.0
    if kind == "cosine":
        left = (1 + math.cos(math.pi * (1 - left))) / 2
    return floor + (peak - floor) * left


def warmup_steps(config: Config) -> float:
    """Length of the warm-up in steps; whole unless it was given in tokens."""
    schedule = config.schedule
    if schedule.warmup_tokens is not None:
        return schedule.warmup_tokens / config.tokens_per_step
    return schedule.warmup_steps or 0


def decay_steps(config: Config) -> float:
    """Length of the final decay of kind wsd in steps; whole unless it was given in tokens."""
    schedule = config.schedule
    if schedule.decay_tokens is not None:
        return schedule.decay_tokens / config.tokens_per_step
    return schedule.decay_steps or 0


def check_schedule(config: Config) -> None:
    """Raise ConfigError when warm-up and decay don't fit the run, or the floor stands above the peak."""
    schedule, total = config.schedule, config.total_steps
    warmup, decay = warmup_steps(config), decay_steps(config)
    if schedule.min_lr > config.optimizer.lr:
        raise ConfigError(f"schedule.min_lr={schedule.min_lr:g} is above the peak optimizer.lr="
                          f"{config.optimizer.lr:g}: the rate would rise; lower min_lr")
    if warmup + decay > total:
        parts = f"warm-up {warmup:g} + decay {decay:g}" if decay else f"warm-up {warmup:g}"
        raise ConfigError(f"schedule: {parts} steps are longer than the run of {total} steps; "
                          "shorten them, or train longer (train.steps, train.tokens)")
    if schedule.kind in ("cosine", "linear") and warmup == total and schedule.min_lr < config.optimizer.lr:
        raise ConfigError(f"schedule: a warm-up of {warmup:g} steps leaves none of the {total} steps for the "
                          f"{schedule.kind} decay; shorten it, or use kind=constant")
