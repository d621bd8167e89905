"""Save and resume is the unbroken run, bit by bit, under every engine."""

import numpy as np
import pytest
from checkpoint_toy import round_trip

from megnorm.testing.ranks import run_ranks

ENGINES = {
    "zero0": {"layout": (1, 2, 1), "zero": 0},
    "zero1": {"layout": (1, 2, 1), "zero": 1},
    "zero2": {"layout": (1, 2, 1), "zero": 2},
    "zero3": {"layout": (1, 2, 1), "zero": 3},
    "zero3 with gathered small parameters": {"layout": (1, 2, 1), "zero": 3, "persist": True},
    "unfused": {"layout": (1, 2, 1), "zero": 1, "optimizer": "adamw_loop"},
    "bf16 zero1": {"layout": (1, 2, 1), "zero": 1, "dtype": "bf16"},
    "bf16 zero2": {"layout": (1, 2, 1), "zero": 2, "dtype": "bf16"},
    "bf16 zero3": {"layout": (1, 2, 1), "zero": 3, "dtype": "bf16"},
    "one process": {"layout": (1, 1, 1), "zero": 1},
    "tp2": {"layout": (1, 1, 2), "zero": 0},
    "tp2 dp2 zero1": {"layout": (1, 2, 2), "zero": 1},
    "tp2 dp2 zero3": {"layout": (1, 2, 2), "zero": 3},
    "pp2 zero0": {"layout": (2, 1, 1), "zero": 0},
    "pp2 dp2 zero1 tied": {"layout": (2, 2, 1), "zero": 1, "tied": True},
    "pp2 bf16 tied": {"layout": (2, 1, 1), "zero": 1, "dtype": "bf16", "tied": True},
    "pp2 with a filler": {"layout": (2, 1, 1), "zero": 1, "bounds": [0, 1, 4]},
    "sgd": {"layout": (1, 2, 1), "zero": 1, "optimizer": "sgd"},
    "momentum": {"layout": (1, 2, 1), "zero": 3, "optimizer": "momentum"},
}


def world_of(settings):
    return int(np.prod(settings["layout"]))


def same(a, b):
    return a.keys() == b.keys() and all(a[k].tobytes() == b[k].tobytes() for k in a)


@pytest.mark.parametrize("name", ENGINES)
def test_three_and_three_steps_are_six_steps(name, tmp_path):
    settings = ENGINES[name]
    world = world_of(settings)
    for unbroken, resumed in run_ranks(round_trip, world, str(tmp_path), settings, 3, 3):
        (losses, (state, step)), (losses_again, (state_again, step_again)) = unbroken, resumed
        assert losses == losses_again and len(set(losses)) == 3
        assert (step, step_again) == (6, 6)
        assert same(state, state_again)
