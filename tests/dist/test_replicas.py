"""What several ranks hold stays bit-equal over a training of 20 steps, and a copy that drifts is named."""

import pytest
import torch
import torch.distributed as dist
from tiny import tiny_config

from megnorm.testing.ranks import run_ranks

LAYOUTS = {
    "tp2_sp_dp2": (4, {"parallel__tp": 2, "parallel__sp": True, "model__bias": True}),
    "tp4_kv2_zero0": (4, {"parallel__tp": 4, "parallel__zero_stage": 0, "train__micro_batch": 8}),
    "pp2_dp2_tied": (4, {"parallel__pp": 2}),
    "cp2_bf16": (2, {"parallel__cp": 2, "train__dtype": "bf16"}),
    "dp2_zero2": (2, {"parallel__zero_stage": 2}),
}


def replicas_after(config, steps, drifting=""):
    """Parameters whose copies differ after ``steps``, and how many this rank looked at; one step before the end,
    rank 1's copy of ``drifting`` is moved by one unit in the last place."""
    from megnorm.build import build_engine
    from megnorm.engine.replicas import unequal_replicas
    from megnorm.engine.start import start
    from megnorm.parallel.groups import make_groups
    from megnorm.plan.layout import make_layout
    from megnorm.testing.parity import micro_batches, perturb

    device = torch.device("cpu")
    start(device, 120)
    groups = make_groups(make_layout(config, dist.get_world_size()), device, config.model.kv_heads)
    engine = build_engine(config, groups)
    perturb(p for p in engine.raw.module.parameters() if hasattr(p, "sharding"))
    for step in range(steps):
        engine.step(micro_batches(config, groups, step), 2e-3, step + 1)
    held = {p.sharding.name: p for p in engine.raw.module.parameters() if hasattr(p, "sharding")}
    if groups.rank == 1 and drifting:
        parameter = held[drifting].data.view(-1)
        parameter[:1] = torch.nextafter(parameter[:1], torch.full_like(parameter[:1], 9.0))
    return unequal_replicas(engine.raw.module, groups), len(held)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_replicas_are_bit_equal_after_20_steps(layout):
    world, changes = LAYOUTS[layout]
    config = tiny_config("hybrid_star", **{"train__micro_batch": 4, **changes})
    for unequal, looked_at in run_ranks(replicas_after, world, config, 20):
        assert unequal == [] and looked_at > 10


def test_a_copy_that_drifts_is_named():
    config = tiny_config("hybrid_star", parallel__tp=2, parallel__sp=True)
    for unequal, _ in run_ranks(replicas_after, 2, config, 2, "layers.3.ffn.in_norm.gain"):
        assert unequal == ["layers.3.ffn.in_norm.gain (ranks 1)"]
