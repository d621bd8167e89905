"""Every layout gives the one-process run's losses, gradient norms, gradients and weights."""

import numpy as np
import pytest
from parity import gathered, in_layout, one_process, tiny_config

from megnorm.testing.ranks import run_ranks

SCHEMES = ["pre", "post", "peri", "hybrid", "hybrid_star"]
LAYOUTS = {
    "dp2": (2, {}),
    "tp2": (2, {"parallel__tp": 2}),
    "pp2": (2, {"parallel__pp": 2}),
    "tp2_pp2_dp2": (8, {"parallel__tp": 2, "parallel__pp": 2}),
}
ENGINES = {
    "dp2_zero0": (2, {"parallel__zero_stage": 0}),
    "dp2_zero2": (2, {"parallel__zero_stage": 2}),
    "dp2_zero3": (2, {"parallel__zero_stage": 3}),
    "tp2_dp2_zero3": (4, {"parallel__tp": 2, "parallel__zero_stage": 3}),
    "tp2_dp2_zero0": (4, {"parallel__tp": 2, "parallel__zero_stage": 0}),
    "tp2_dp2_zero2": (4, {"parallel__tp": 2, "parallel__zero_stage": 2}),
    "pp2_dp2_zero0": (4, {"parallel__pp": 2, "parallel__zero_stage": 0}),
    "pp4_untied": (4, {"parallel__pp": 4, "model__tie_embeddings": False}),
    "pp2_recompute": (2, {"parallel__pp": 2, "parallel__recompute": "full"}),
    "dp2_zero3_recompute": (2, {"parallel__zero_stage": 3, "parallel__recompute": "full"}),
    "decay_everything": (2, {"parallel__pp": 2, "optimizer__decay_norms": True, "optimizer__decay_biases": True}),
}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scheme_in_layout(scheme, layout):
    world, changes = LAYOUTS[layout]
    check(world, tiny_config(scheme, **changes))


@pytest.mark.parametrize("engine", ENGINES)
def test_engine_in_layout(engine):
    world, changes = ENGINES[engine]
    check(world, tiny_config("hybrid_star", **changes))


def check(world, config):
    (reference,) = run_ranks(one_process, 1, config)
    ranks = run_ranks(in_layout, world, config)
    for optimizer, expected in reference.items():
        for rank in ranks:
            for what in ("losses", "norms", "eval"):
                np.testing.assert_allclose(rank[optimizer][what], expected[what], rtol=1e-5, err_msg=what)
        whole = gathered([rank[optimizer] for rank in ranks])
        assert sorted(whole) == sorted(expected["weights"])
        for name, weight in expected["weights"].items():
            difference = np.linalg.norm(whole[name] - weight) / np.linalg.norm(weight)
            assert difference < 1e-5, f"{name} after {optimizer}: {difference:.1e}"
