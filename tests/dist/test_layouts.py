"""Every layout gives the one-process run's losses, gradient norms, gradients and weights."""

from functools import cache

import pytest
from tiny import tiny_config

from megnorm.config import Config
from megnorm.plan.layout import make_layout
from megnorm.testing.compare import judge
from megnorm.testing.parity import in_layout, reference
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
    "cp2_recompute_selective": (2, {"parallel__cp": 2, "parallel__recompute": "selective"}),
    "pp2_recompute": (2, {"parallel__pp": 2, "parallel__recompute": "full"}),
    "dp2_zero3_recompute": (2, {"parallel__zero_stage": 3, "parallel__recompute": "full"}),
    "tp2_sp_dp2": (4, {"parallel__tp": 2, "parallel__sp": True, "model__bias": True}),
    "tp2_sp_pp2": (4, {"parallel__tp": 2, "parallel__sp": True, "parallel__pp": 2}),
    "tp4_kv2": (4, {"parallel__tp": 4, "train__micro_batch": 4}),
    "tp4_kv1_sp_zero0": (4, {"parallel__tp": 4, "parallel__sp": True, "parallel__zero_stage": 0,
                             "model__kv_heads": 1, "train__micro_batch": 4}),
    "tp8_kv2_sp": (8, {"parallel__tp": 8, "parallel__sp": True, "model__heads": 8,
                       "train__micro_batch": 8}),
    "cp2": (2, {"parallel__cp": 2}),
    "cp2_dp2_zero3": (4, {"parallel__cp": 2, "parallel__zero_stage": 3}),
    "cp2_tp2_sp": (4, {"parallel__cp": 2, "parallel__tp": 2, "parallel__sp": True, "model__kv_heads": 4}),
    "cp2_pp2": (4, {"parallel__cp": 2, "parallel__pp": 2}),
    "pp3_uneven": (3, {"parallel__pp": 3, "parallel__stages": [2, 1, 1]}),
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
    expected, ranks = reference_of(config), run_ranks(in_layout, world, config)
    verdict = judge(expected, ranks, make_layout(config, world))
    assert verdict.agrees, "\n".join(verdict.faults)
    (norm,) = expected["gradient"]["norms"]  # of equal weights, so that nothing but its own sum can be off
    assert [rank["gradient"]["norms"][0] for rank in ranks] == pytest.approx([norm] * world, rel=1e-6)


def reference_of(config):
    """The one-process results for a configuration, whatever its layout; computed once."""
    return _reference(config.model_copy(update={"parallel": type(config.parallel)()}).model_dump_json())


@cache
def _reference(config):
    (expected,) = run_ranks(reference, 1, Config.model_validate_json(config))
    return expected
