"""Models with experts in bf16: layouts agree as far as rounding lets them; the gradient norm counts every element
of every expert once, whichever optimizer of the engine holds it."""

from contextlib import ExitStack

import numpy as np
import pytest
import torch
import torch.distributed as dist
from faults import swap
from test_moe_layouts import BALANCED, experts

from megnorm.testing.ranks import run_ranks

LAYOUTS = {
    "ep2 tp2, biases": (4, {"parallel__ep": 2, "parallel__tp": 2, "parallel__zero_stage": 0}),
    "ep2 pp2": (4, {"parallel__ep": 2, "parallel__pp": 2}),
    "ep2 zero2": (2, {"parallel__ep": 2, "parallel__zero_stage": 2}),
}
STEPS = 6


def config(**changes):
    return experts(BALANCED, train__dtype="bf16", model__bias=True, **changes)


def trained(config, steps, counted_by_deepspeed=False):
    """Losses, gradient norms, and this rank's share of their squares by its own sums."""
    from megnorm.build import build_engine
    from megnorm.engine import clip
    from megnorm.engine.gradients import before_update, squared_norms
    from megnorm.engine.start import start
    from megnorm.parallel.groups import make_groups
    from megnorm.plan.layout import make_layout
    from megnorm.testing.parity import micro_batches

    device, squares = torch.device("cpu"), []
    start(device, 120)
    groups = make_groups(make_layout(config, dist.get_world_size()), device, config.model.kv_heads)
    with ExitStack() as stack:
        if counted_by_deepspeed:
            swap(stack, clip, "sum_by_rows", lambda _: lambda optimizer: None)
        engine = build_engine(config, groups)
    before_update(engine.raw, lambda: squares.append(float(sum(squared_norms(engine.raw, groups).values()))))
    results = [engine.step(micro_batches(config, groups, step), 2e-3, step + 1) for step in range(steps)]
    return [r.loss for r in results], [r.grad_norm for r in results], squares


@pytest.fixture(scope="module")
def alone():
    ((losses, norms, _),) = run_ranks(trained, 1, config(), STEPS)
    return losses, norms


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_agrees_within_rounding(layout, alone):
    world, changes = LAYOUTS[layout]
    ranks = run_ranks(trained, world, config(**changes), STEPS)
    own = np.sqrt(np.sum([squares for _, _, squares in ranks], 0))
    for losses, norms, _ in ranks:
        np.testing.assert_allclose(losses, alone[0], rtol=5e-3)
        np.testing.assert_allclose(norms, alone[1], rtol=3e-2)
        np.testing.assert_allclose(norms, own, rtol=1e-6)


@pytest.mark.parametrize("stage", [0, 1])
def test_every_expert_counts_once_in_the_norm_by_parameter(stage):
    """In fp32, of what the probes of gradients show."""
    ranks = run_ranks(trained, 4, experts(BALANCED, parallel__ep=2, parallel__zero_stage=stage), 1)
    own = np.sqrt(sum(squares[0] for _, _, squares in ranks))
    assert [norms[0] for _, norms, _ in ranks] == pytest.approx([own] * 4, rel=1e-6)


def test_the_engine_itself_counts_biases_of_experts_twice():
    """Of DeepSpeed 0.19.8: why ``sum_by_rows`` chooses what is counted."""
    world, changes = LAYOUTS["ep2 tp2, biases"]
    ranks = run_ranks(trained, world, config(**changes), 1, True)
    own = np.sqrt(sum(squares[0] for _, _, squares in ranks))
    assert ranks[0][1][0] > own * (1 + 1e-5)
