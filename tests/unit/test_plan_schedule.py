"""Learning rates against worked-out numbers; the first step, the peak and the floor are exact."""

import pytest

from megnorm.config import Config, ConfigError, parse_config
from megnorm.plan.schedule import check_schedule, learning_rate


def make(steps: int = 100, lr: float = 1.0, **schedule) -> Config:
    return parse_config({"run_dir": "r", "model": {"layers": 1, "hidden": 8, "heads": 2, "vocab_size": 8},
                         "data": {"sequence_length": 8, "train": "t"},
                         "train": {"steps": steps, "micro_batch": 1, "global_batch": 4},
                         "optimizer": {"lr": lr}, "schedule": schedule})


def test_cosine_table() -> None:
    """Bug report K10-1: after 50 and 51 steps; 0-based numbers 49 and 50."""
    config = make(kind="cosine", warmup_steps=10, min_lr=0.1)
    assert learning_rate(config, 49) == pytest.approx(0.6281417, abs=5e-8)
    assert learning_rate(config, 50) == pytest.approx(0.6126279, abs=5e-8)


@pytest.mark.parametrize("kind, more, last", [
    ("cosine", {}, 3e-4), ("linear", {}, 3e-4), ("constant", {}, 3e-3), ("wsd", {"decay_steps": 20}, 3e-4)])
def test_ends_are_exact(kind: str, more: dict, last: float) -> None:
    config = make(kind=kind, warmup_steps=10, min_lr=3e-4, lr=3e-3, **more)
    rates = [learning_rate(config, step) for step in range(100)]
    assert rates[0] == 3e-3 / 10
    assert rates[9] == 3e-3 and rates[8] < 3e-3
    assert rates[99] == last and learning_rate(config, 500) == last
    assert all(a >= b for a, b in zip(rates[9:], rates[10:], strict=False))


def test_linear_and_wsd_between() -> None:
    linear = make(kind="linear", warmup_steps=10, min_lr=0.1)
    assert learning_rate(linear, 54) == pytest.approx(0.55)
    wsd = make(kind="wsd", warmup_steps=10, min_lr=0.1, decay_steps=20)
    assert learning_rate(wsd, 79) == 1.0 and learning_rate(wsd, 80) == pytest.approx(1 - 0.9 / 20)
    assert learning_rate(wsd, 89) == pytest.approx(0.55)


def test_tokens_are_steps_times_the_batch() -> None:
    in_steps = make(kind="wsd", warmup_steps=10, decay_steps=20)
    in_tokens = make(kind="wsd", warmup_tokens=320, decay_tokens=640)
    for step in range(100):
        assert learning_rate(in_steps, step) == learning_rate(in_tokens, step)
    between = make(kind="cosine", warmup_tokens=330, min_lr=0.25)
    assert learning_rate(between, 9) == pytest.approx(10 / 10.3125)
    assert 0.99 < learning_rate(between, 10) < 1.0
    assert learning_rate(between, 99) == 0.25


def test_no_warmup() -> None:
    assert learning_rate(make(kind="constant"), 0) == 1.0
    assert learning_rate(make(kind="linear"), 0) == pytest.approx(0.99)
    assert learning_rate(make(steps=1, kind="cosine", min_lr=0.5), 0) == 0.5


@pytest.mark.parametrize("schedule, words", [
    ({"kind": "cosine", "warmup_steps": 101}, "warm-up 101 steps are longer than the run of 100"),
    ({"kind": "wsd", "warmup_steps": 60, "decay_steps": 41}, "warm-up 60 [+] decay 41"),
    ({"kind": "wsd", "warmup_tokens": 3200, "decay_tokens": 1}, "longer than the run"),
    ({"kind": "linear", "warmup_steps": 100}, "leaves none of the 100 steps"),
    ({"kind": "cosine", "min_lr": 2.0}, "above the peak"),
])
def test_impossible_schedules_are_refused(schedule: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_schedule(make(**schedule))


def test_possible_schedules_pass() -> None:
    for schedule in ({}, {"kind": "wsd", "warmup_steps": 60, "decay_steps": 40}, {"warmup_steps": 99},
                     {"kind": "constant", "warmup_steps": 100}):
        check_schedule(make(**schedule))
