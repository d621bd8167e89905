"""Each replica's own forward and gradients (before any sum over replicas) equal its own one-rank run, in
fp64, for every norm slot; gradients of replicated parameters are bit-equal over tensor-parallel ranks; no
collective uses the default group."""

from functools import cache
from unittest import mock

import pytest
import torch
from test_parallel_layers import no_default_group
from tiny import tiny_config

from megnorm.build import build_module
from megnorm.parallel.groups import make_groups
from megnorm.parallel.tensor import TensorParallel
from megnorm.plan.layout import Layout, make_layout
from megnorm.testing.parity import perturb
from megnorm.testing.ranks import run_ranks

HEADS = {"q_norm": "default", "k_norm": "default", "v_norm": "default", "ctx_norm": "default"}
ALL = {name: {"scope": "all_heads"} for name in HEADS}
EACH = {name: {"gain": "per_head"} for name in HEADS}
AROUND = {"in_norm": "default", "out_norm": "default", "post_norm": "default"}
LEARNED = {"residual_scale": {"learned": "vector"}, "branch_scale": {"value": 0.7, "learned": "scalar"}}
NORMED = {"residual_from": "normed", "residual_scale": 1.3, "branch_scale": 0.7}
CASES = {
    "gains of heads": {"scheme": "hybrid_star", "overrides": {":": {"attention": HEADS}}},
    "gains of heads, LayerNorm": {"scheme": "hybrid_star", "kind": "layer", "bias": True,
                                  "overrides": {":": {"attention": {**HEADS, **AROUND}}}},
    "all heads and mid": {"scheme": "pre", "overrides": {":": {"attention": ALL,
                                                               "ffn": {"mid_norm": "default", **AROUND}}}},
    "all heads and mid, LayerNorm": {"scheme": "post", "kind": "layer", "bias": True, "overrides": {
        ":": {"attention": ALL, "ffn": {"mid_norm": "default", **NORMED}}}},
    "gains per head, gates, factors": {"scheme": "pre", "embed_norm": "default", "overrides": {
        ":": {"attention": {**EACH, **LEARNED, "gate": "head", "head_scale": "before"},
              "ffn": {**LEARNED, "mid_norm": {"kind": "dyt"}}}}},
    "normed residual": {"scheme": "custom", "final_norm": "default", "overrides": {
        ":": {"attention": {"in_norm": "default", "head_scale": "after", **NORMED},
              "ffn": {"in_norm": "default", **NORMED}}}},
}
LAYOUTS = {
    "tp2 dp2": {"tp": 2},
    "tp2 dp2, sequence parallel": {"tp": 2, "sp": True},
    "tp4": {"tp": 4},
    "tp4 over 2 kv heads": {"tp": 4, "kv_heads": 2},
}


def config_of(case, tp=1, sp=False, kv_heads=4):
    return tiny_config(CASES[case], parallel__tp=tp, parallel__sp=sp, model__kv_heads=kv_heads,
                       model__layers=2, model__bias=True, model__vocab_size=45, model__init={"std": 0.2})


def batch(replica):
    """tokens, targets, weights; other ones for each replica."""
    stream = torch.Generator().manual_seed(replica)
    ids = torch.randint(45, (2, 17), generator=stream)
    return ids[:, :-1], ids[:, 1:], torch.rand(2, 16, generator=stream, dtype=torch.float64)


def module_of(config, groups):
    module = build_module(config, groups)
    module.double()
    perturb(module.parameters())
    return module


def run(module, replica):
    """Loss, and (sharding, gradient) of every parameter."""
    module.zero_grad()
    loss = module(*batch(replica))
    loss.backward()
    return loss.item(), [(p.sharding, p.grad.numpy().copy()) for p in module.parameters()]


def alone(cases, kv_heads):
    """On one rank: every case on the batch of either replica."""
    groups = make_groups(Layout(pp=1, dp=1, tp=1), torch.device("cpu"))
    found = {}
    for case in cases:
        module = module_of(config_of(case, kv_heads=kv_heads), groups)
        found[case] = [run(module, replica) for replica in (0, 1)]
    return found


def in_layout(cases, about):
    """On each of 4 ranks: its replica, and every case on that replica's batch."""
    found = {}
    for case in cases:
        config = config_of(case, **about)
        groups = make_groups(make_layout(config, 4), torch.device("cpu"), config.model.kv_heads)
        with no_default_group():
            found[case] = run(module_of(config, groups), groups.replica)
    return groups.replica, found


@cache
def reference(kv_heads):
    return run_ranks(alone, 1, tuple(CASES), kv_heads)[0]


@cache
def measured(layout):
    return run_ranks(in_layout, 4, tuple(CASES), LAYOUTS[layout])


def differences(ranks, case, kv_heads):
    """Names whose gradient differs from one rank's, "loss" among them, with got / right."""
    found = {}
    for replica, results in ranks:
        right_loss, right = reference(kv_heads)[case][replica]
        loss, gradients = results[case]
        whole = {sharding.name: gradient for sharding, gradient in right}
        assert {sharding.name for sharding, _ in gradients} == set(whole)
        if abs(loss - right_loss) > 1e-10 * abs(right_loss):
            found["loss"] = loss / right_loss
        for sharding, gradient in gradients:
            part, size = whole[sharding.name][sharding.slices()], abs(whole[sharding.name]).max()
            if abs(gradient - part).max() > 1e-10 * max(size, 1e-3):
                found[sharding.name] = float((gradient * part).sum() / (part * part).sum())
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_one_rank(layout, case):
    ranks = measured(layout)
    assert len({reference(4)[case][replica][0] for replica in (0, 1)}) == 2, "replicas see other data"
    assert differences(ranks, case, LAYOUTS[layout].get("kv_heads", 4)) == {}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_have_bit_equal_gradients(layout, case):
    """Of whatever several ranks of a replica hold: norm gains, biases, shared key/value heads."""
    ranks, seen = measured(layout), {}
    for replica, results in ranks:
        for sharding, gradient in results[case][1]:
            first = seen.setdefault((replica, sharding.name, sharding.slices().__repr__()), gradient)
            assert (first == gradient).all(), sharding.name


FAULTS = {"shared": lambda tp, parameter: parameter, "statistic": lambda tp, x: x * tp.size}


def with_fault(case, method):
    with mock.patch.object(TensorParallel, method, FAULTS[method]):
        return in_layout((case,), {"tp": 2})


def test_a_gain_whose_gradient_is_not_summed_is_found():
    """And nothing else: only the gains that each rank uses for its own heads."""
    found = differences(run_ranks(with_fault, 4, "gains of heads", "shared"), "gains of heads", 4)
    assert set(found) == {f"layers.{layer}.attention.{name}.gain" for layer in (0, 1) for name in HEADS}


def test_a_statistic_of_one_rank_is_found():
    found = differences(run_ranks(with_fault, 4, "all heads and mid", "statistic"), "all heads and mid", 4)
    assert "loss" in found and "layers.0.ffn.mid_norm.gain" in found
