"""Slots beyond the five first schemes give the one-process run's losses, gradients and weights in every layout.

Two models hold all of them between them, on layers that stand on both sides of a pipeline cut.
"""

import pytest
import torch
from test_layouts import check
from tiny import tiny_config

from megnorm.plan.layout import make_layout
from megnorm.testing.ranks import run_ranks

LEARNED = {"learned": "vector"}
DYT = {"kind": "dyt", "alpha_init": 1.0, "bias": True}
# One stream: heads normed in every way, gates, factors per head, per channel and by the step, soft-caps, z-loss.
ONE = {
    "scheme": "pre", "embed_scale": {"value": 3.0, "learned": "scalar"}, "embed_norm": "default",
    "attention_softcap": 1.5, "attention_scale": 0.5, "final_softcap": 4.0,
    "overrides": {
        "0": {"attention": {"in_norm": DYT, "q_norm": {"gain": "per_head"},
                            "k_norm": {"gain": "per_head", "bias": True}, "v_norm": DYT,
                            "ctx_norm": {**DYT, "scope": "all_heads"}, "head_scale": "before",
                            "out_norm": {"zero_centred": True}, "residual_scale": LEARNED},
              "ffn": {"mid_norm": DYT, "branch_scale": {"value": 0.5, "learned": "scalar"}}},
        "1": {"attention": {"q_norm": {"scope": "all_heads", "kind": "layer", "bias": True, "rope": "after"},
                            "k_norm": {"scope": "all_heads", "kind": "l2"}, "ctx_norm": {"gain": "none"},
                            "gate": "head", "branch_scale": {"ramp_steps": 3}},
              "ffn": {"mid_norm": {"kind": "layer", "bias": True}, "post_norm": {"kind": "l2", "scale": 4.0}}},
        "2": {"attention": {"q_norm": DYT, "k_norm": {**DYT, "scope": "all_heads"}, "v_norm": {"zero_centred": True},
                            "ctx_norm": {"scope": "all_heads", "zero_centred": True}, "gate": "element",
                            "head_scale": "after", "branch_scale": {**LEARNED, "value": 0.3}},
              "ffn": {"residual_from": "normed", "mid_norm": {"kind": "l2", "gain": "none", "scale": 5.0}}},
        "3": {"attention": {"q_norm": {"rope": "after"}, "k_norm": {"rope": "after", "gain": "none"},
                            "in_norm": {"scale": 0.5, "rounding": "cast_then_gain"}},
              "ffn": {"residual_scale": {**LEARNED, "ramp_steps": 7},
                      "branch_scale": {"value": 0.7, "ramp_steps": 2}}}}}
TWO = {"scheme": "residual", "embed_norm": "default", "final_softcap": 4.0,
       "overrides": {"1": {"attention": {"residual_scale": LEARNED, "v_norm": "default"},
                           "ffn": {"branch_scale": LEARNED}}}}
MODELS = {"one": ONE, "two": TWO}
LAYOUTS = {
    "tp2_dp2": (4, {"parallel__tp": 2}),
    "tp2_sp_pp2": (4, {"parallel__tp": 2, "parallel__sp": True, "parallel__pp": 2}),
    "tp4": (4, {"parallel__tp": 4}),  # two ranks hold copies of each of the two key and value heads
    "pp2_recompute": (2, {"parallel__pp": 2, "parallel__recompute": "full", "model__tie_embeddings": False}),
    "dp2_zero3_recompute": (2, {"parallel__zero_stage": 3, "parallel__recompute": "full"}),
    "cp2": (2, {"parallel__cp": 2}),
}


def config(model, **changes):
    return tiny_config(MODELS[model], model__z_loss=0.1, **changes)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_slots_in_layout(model, layout):
    world, changes = LAYOUTS[layout]
    check(world, config(model, **changes))


# What a run records and measures beside its loss.

def measured(chosen):
    """On each rank: z-loss of one step, and Admin's factors by name."""
    import torch.distributed as dist

    from megnorm.build import build_engine, build_module
    from megnorm.engine.start import start
    from megnorm.model.profile import profile
    from megnorm.parallel.groups import make_groups
    from megnorm.testing.parity import micro_batches

    start(torch.device("cpu"), 600)
    groups = make_groups(make_layout(chosen, dist.get_world_size()), torch.device("cpu"), chosen.model.kv_heads)
    module = build_module(chosen, groups)
    batches = micro_batches(chosen, groups, 0)
    profile(module, chosen.model.layers, [inputs for inputs, _, _ in batches], groups)
    factors = {p.sharding.name: p.detach().clone() for p in module.parameters() if "_scale" in p.sharding.name}
    result = build_engine(chosen, groups, module).step(batches, 1e-3, 1)
    return result.loss, result.beside, factors


@pytest.mark.parametrize(("world", "changes"), [
    (2, {"parallel__pp": 2, "data__mask_documents": True}), (4, {"parallel__tp": 2, "parallel__sp": True}),
    (2, {"parallel__cp": 2})])
def test_z_loss_and_admins_factors_in_layout(world, changes):
    def chosen(**layout):
        return tiny_config("admin", model__z_loss=0.1, **layout)

    of_data = {key: value for key, value in changes.items() if key.startswith("data")}
    ((loss, beside, factors),) = run_ranks(measured, 1, chosen(**of_data))
    assert 0.1 * 3 ** 2 < beside["z_loss"] < 0.1 * 6 ** 2
    assert len(factors) == 8 and all(factor.shape == (32,) for factor in factors.values())
    ranks = run_ranks(measured, world, chosen(**changes))
    seen = {}
    for got_loss, got_beside, got in ranks:
        assert got_loss == pytest.approx(loss, rel=1e-6)
        assert got_beside["z_loss"] == pytest.approx(beside["z_loss"], rel=1e-6)
        seen |= got
    assert seen.keys() == factors.keys()
    for name, right in factors.items():
        assert torch.allclose(seen[name], right, rtol=1e-6), name
