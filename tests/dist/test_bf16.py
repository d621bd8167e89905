"""bf16 weights with fp32 masters and fp32 accumulation: layouts agree as far as rounding lets them, gains move."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tiny import tiny_config

from megnorm.testing.ranks import run_ranks

LAYOUTS = {
    "dp2_zero0": (2, {"parallel__zero_stage": 0}),
    "dp2_zero2": (2, {"parallel__zero_stage": 2}),
    "dp2_zero3": (2, {"parallel__zero_stage": 3}),
    "tp2_sp": (2, {"parallel__tp": 2, "parallel__sp": True}),
    "pp2": (2, {"parallel__pp": 2}),
    "tp2_pp2": (4, {"parallel__tp": 2, "parallel__pp": 2, "parallel__zero_stage": 0}),
}


def train(config, steps, lr, same_sample=False, first=0):
    """Losses, gradient norms and fp32 masters of this rank after ``steps`` on the batches from ``first`` on."""
    from megnorm.build import build_engine
    from megnorm.engine.start import start
    from megnorm.engine.state import MASTER, read_state
    from megnorm.parallel.groups import make_groups
    from megnorm.plan.layout import make_layout
    from megnorm.testing.parity import global_batch, micro_batches

    device = torch.device("cpu")
    start(device, 120)
    groups = make_groups(make_layout(config, dist.get_world_size()), device, config.model.kv_heads)
    engine = build_engine(config, groups)
    if same_sample:
        tokens, targets, _ = (t[-1:] for t in global_batch(tiny_config(), 0))
        weights = torch.full(targets.shape, 1 / targets.numel())
        batches = [[(tokens, targets, weights)] * config.train.global_batch] * steps
    else:
        batches = [micro_batches(config, groups, first + step) for step in range(steps)]
    results = [engine.step(batch, lr, step + 1) for step, batch in enumerate(batches)]
    masters = {p.sharding.name: (p.sharding.role, values[MASTER].numpy().copy()) for p, values in read_state(engine.raw)}
    return [r.loss for r in results], [r.grad_norm for r in results], masters


@pytest.fixture(scope="module")
def alone():
    ((losses, norms, _),) = run_ranks(train, 1, tiny_config(train__dtype="bf16"), 8, 2e-3)
    return losses, norms


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_agrees_within_rounding(layout, alone):
    world, changes = LAYOUTS[layout]
    for losses, norms, _ in run_ranks(train, world, tiny_config(train__dtype="bf16", **changes), 8, 2e-3):
        np.testing.assert_allclose(losses, alone[0], rtol=5e-3)
        np.testing.assert_allclose(norms, alone[1], rtol=3e-2)


def test_fifty_steps_differ_less_than_with_other_batches():
    """Layouts round otherwise, which over 50 steps moves the loss; the choice of batches moves it far more."""
    def losses(world, first=0, **changes):
        config = tiny_config(train__dtype="bf16", train__micro_batch=4, **changes)
        return np.array(run_ranks(train, world, config, 50, 2e-3, False, first)[0][0])

    alone = losses(1)
    others = np.abs(losses(1, first=1000) - alone).mean()
    for changes in ({"parallel__tp": 2, "parallel__sp": True}, {"parallel__pp": 2}, {"parallel__zero_stage": 2}):
        layout = np.abs(losses(2, **changes) - alone).mean()
        print(changes, f"mean difference {layout:.1e}, of other batches {others:.1e}")
        assert layout < 0.2 * others


def test_gains_move():
    """Near 1 a bf16 number has neighbours 2^-7 and 2^-8 away: without masters these steps round to nothing."""
    ((_, _, masters),) = run_ranks(train, 1, tiny_config(train__dtype="bf16", train__micro_batch=4), 20, 1e-4)
    gains = np.concatenate([values for role, values in masters.values() if role == "norm"])
    assert (gains != 1.0).mean() > 0.99
    assert np.abs(gains - 1).max() < 2**-8  # so small that bf16 weights alone would not have moved


def test_gradients_accumulate_in_fp32():
    """512 equal micro batches have the gradient of one; a bf16 sum of 512 equal terms stops at half of it."""
    norms = {}
    for count in (1, 512):
        config = tiny_config(train__dtype="bf16", train__micro_batch=1, train__global_batch=count, model__layers=1)
        ((_, (norms[count],), _),) = run_ranks(train, 1, config, 1, 0.0, True)
    assert norms[512] == pytest.approx(norms[1], rel=1e-3)


def norm_beside_fp64(config):
    """The engine's gradient norm of one step, and the one of the same gradients in fp64."""
    from megnorm.build import build_engine
    from megnorm.engine.gradients import before_update, squared_norms
    from megnorm.engine.start import start
    from megnorm.parallel.groups import make_groups
    from megnorm.plan.layout import make_layout
    from megnorm.testing.parity import micro_batches

    device, squares = torch.device("cpu"), []
    start(device, 120)
    groups = make_groups(make_layout(config, dist.get_world_size()), device, config.model.kv_heads)
    engine = build_engine(config, groups)
    before_update(engine.raw, lambda: squares.append(sum(squared_norms(engine.raw, groups).values())))
    result = engine.step(micro_batches(config, groups, 0), 1e-3, 1)
    return result.grad_norm, float(squares[0].sqrt())


def test_the_norm_of_a_large_tensor():
    """torch's fp32 sum over the embedding's 4 million squares is off by more than that on a CPU."""
    config = tiny_config(train__dtype="bf16", model__vocab_size=2**17 - 1, model__layers=1)
    ((got, right),) = run_ranks(norm_beside_fp64, 1, config)
    assert got == pytest.approx(right, rel=1e-6)
