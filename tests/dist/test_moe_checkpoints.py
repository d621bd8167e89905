"""Checkpoints of models with experts: written at one expert-parallel size, loaded at another with optimizer state
and balancing biases; at the same layout the run goes on bit by bit; copies of experts stay equal."""

from contextlib import ExitStack
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
import torch.distributed as dist
from faults import swap
from tiny import tiny_config

from megnorm.checkpoint.resume import CheckpointError
from megnorm.testing.ranks import run_ranks

MOE = {"experts": 4, "top_k": 2, "ffn_hidden": 16, "layers": "first dense 1", "router": "sigmoid",
       "normalise_top_k": True, "balance": "bias", "bias_rate": 0.01, "shared_experts": 1}
SAVED, STEPS = 3, 8


def experts(**changes):
    return tiny_config(model__moe=MOE, model__layers=2, **changes)


def trained(config, run_dir, first, last, save_at=0, plant=""):
    """Losses, gradient norms, and every tensor of this rank after steps ``first`` + 1 to ``last``; loaded from the
    checkpoint of step ``first`` where there is one, saved at ``save_at``."""
    from megnorm.build import build_engine
    from megnorm.checkpoint.load import load
    from megnorm.checkpoint.save import save
    from megnorm.checkpoint.storage import checkpoints_dir, step_name
    from megnorm.engine.replicas import unequal_replicas
    from megnorm.engine.start import start
    from megnorm.engine.state import other_states, read_state
    from megnorm.parallel.groups import make_groups
    from megnorm.plan.layout import make_layout
    from megnorm.testing.parity import micro_batches

    device = torch.device("cpu")
    start(device, 120)
    groups = make_groups(make_layout(config, dist.get_world_size()), device, config.model.kv_heads)
    engine, numbers = build_engine(config, groups), []
    with ExitStack() as stack:
        if plant:
            FAULTS[plant](stack)
        if first:
            try:
                load(checkpoints_dir(run_dir) / step_name(first), engine.raw, groups)
            except CheckpointError as error:
                return str(error)
        for step in range(first, last):
            result = engine.step(micro_batches(config, groups, step), 2e-3, step + 1)
            numbers.append((result.loss, result.grad_norm))
            if step + 1 == save_at:
                save(run_dir, engine.raw, groups, trainer={"step": step + 1}, config={}, keep_last=9)
    assert unequal_replicas(engine.raw.module, groups) == []
    tensors = {f"{p.sharding.name}/{key}": value.numpy().tobytes()
               for p, values in read_state(engine.raw) for key, value in values.items()}
    states = {sharding.name: value.numpy().copy() for sharding, value in other_states(engine.raw, groups)}
    return numbers, tensors, states


WRITERS = {
    "one process": (1, {}),
    "ep2 of dp4": (4, {"parallel__ep": 2}),
    "ep4": (4, {"parallel__ep": 4, "parallel__zero_stage": 2}),
}
READERS = {
    "one process": (1, {}),
    "dp2 zero3": (2, {"parallel__zero_stage": 3}),
    "ep2 tp2 sp": (4, {"parallel__ep": 2, "parallel__tp": 2, "parallel__sp": True, "parallel__zero_stage": 0}),
    "ep2 pp2": (4, {"parallel__ep": 2, "parallel__pp": 2}),
    "ep4": (4, {"parallel__ep": 4}),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The run directory of each writer, with a checkpoint after step ``SAVED``."""
    @cache
    def write(writer):
        world, changes = WRITERS[writer]
        folder = tmp_path_factory.mktemp("run")
        run_ranks(trained, world, experts(**changes), str(folder), 0, SAVED, SAVED)
        return str(folder)
    return write


@pytest.fixture(scope="module")
def unbroken():
    ((numbers, _, states),) = run_ranks(trained, 1, experts(), "", 0, STEPS)
    return numbers, states


@pytest.mark.parametrize(("writer", "reader"), [
    ("one process", "ep2 tp2 sp"), ("one process", "ep4"), ("ep2 of dp4", "one process"), ("ep2 of dp4", "ep4"),
    ("ep4", "ep2 pp2"), ("ep4", "dp2 zero3")])
def test_another_layout_goes_on(writer, reader, written, unbroken):
    world, changes = READERS[reader]
    found = run_ranks(trained, world, experts(**changes), written(writer), SAVED, STEPS)
    for numbers, _, states in found:
        np.testing.assert_allclose(numbers, unbroken[0][SAVED:], rtol=1e-5)
        for name, value in states.items():
            assert np.array_equal(value, unbroken[1][name]) and np.abs(value).max() > 0
    assert any(states for _, _, states in found)


@pytest.mark.parametrize("changes", [{}, {"train__dtype": "bf16"}], ids=["fp32", "bf16"])
def test_same_layout_goes_on_bit_by_bit(changes, tmp_path):
    config = experts(parallel__ep=2, **changes)
    whole = run_ranks(trained, 4, config, str(tmp_path), 0, SAVED + 2, SAVED)
    for (numbers, tensors, states), (later, again, states_again) in zip(
            whole, run_ranks(trained, 4, config, str(tmp_path), SAVED, SAVED + 2), strict=True):
        assert numbers[SAVED:] == later and tensors == again
        assert all(np.array_equal(states[name], states_again[name]) for name in states) and states


# Faults

FAULTS = {}


def fault(plant):
    FAULTS[plant.__name__] = plant
    return plant


@fault
def experts_of_the_first_rank_only(stack):
    from megnorm.parallel.groups import Groups

    swap(stack, Groups, "accounts_for", lambda _: lambda self, sharding: self.ep.rank == 0)


@fault
def experts_numbered_within_the_rank(stack):
    from megnorm.parallel.sharding import ExpertSlice, Sharding

    swap(stack, Sharding, "by_expert", lambda parts: lambda self: parts(
        self if self.experts is None else replace(self, experts=ExpertSlice(0, 2))))


def test_experts_that_nobody_saved_are_missed(tmp_path):
    run_ranks(trained, 2, experts(parallel__ep=2), str(tmp_path), 0, 1, 1, "experts_of_the_first_rank_only")
    (message,) = run_ranks(trained, 1, experts(), str(tmp_path), 1, 1)
    assert "layers.1.ffn.experts.down.2 is missing" in message


def test_experts_read_twice_are_noticed(written):
    for message in run_ranks(trained, 2, experts(parallel__ep=2), written("one process"), SAVED, SAVED, 0,
                             "experts_numbered_within_the_rank"):
        assert "layers.1.ffn.experts.gate_up.0/master was read 2 times" in message
        assert "layers.1.ffn.experts.gate_up.2/master is left over" in message


def drifted(config):
    from megnorm.build import build_module
    from megnorm.engine.replicas import unequal_replicas
    from megnorm.engine.start import start
    from megnorm.parallel.groups import make_groups
    from megnorm.parallel.sharding import kept_states
    from megnorm.plan.layout import make_layout

    start(torch.device("cpu"), 120)
    groups = make_groups(make_layout(config, 4), torch.device("cpu"))
    module = build_module(config, groups)
    alike = unequal_replicas(module, groups)
    if groups.rank == 3:
        with torch.no_grad():
            next(p for p in module.parameters() if p.sharding.name.endswith("experts.down"))[0, 0, 0] += 1e-6
            kept_states(module)["layers.1.ffn.router.balance"][0] += 1
    return alike, unequal_replicas(module, groups)


def test_an_expert_that_drifts_is_named():
    """Ranks 1 and 3 hold the same experts, ranks 0 and 1 others."""
    for alike, unequal in run_ranks(drifted, 4, experts(parallel__ep=2)):
        assert alike == []
        assert unequal == ["layers.1.ffn.experts.down (ranks 3)", "layers.1.ffn.router.balance (ranks 3)"]
