"""Models with experts: every layout gives the one-process run's losses, gradient norms, gradients of routers and
experts, auxiliary losses, loads and balancing biases; planted faults of the kinds that public reports describe
are caught."""

from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from faults import swap
from test_layouts import check, reference_of
from tiny import tiny_config

from megnorm.plan.layout import make_layout
from megnorm.testing.compare import judge
from megnorm.testing.parity import PHASES, in_layout, reference
from megnorm.testing.ranks import RankFailed, run_ranks

PLAIN = {"experts": 4, "top_k": 2, "ffn_hidden": 16, "aux_weight": 0.1, "z_weight": 0.1}
# No block with experts on the first of two stages; biases of the balance move beside a loss, groups, shared experts.
BALANCED = {**PLAIN, "layers": "first dense 1", "router": "sigmoid", "normalise_top_k": True, "balance": "bias",
            "bias_rate": 0.05, "groups": 2, "top_groups": 1, "shared_experts": 1}
# By sequence, some tokens dropped, norms inside the experts.
CAPPED = {**PLAIN, "balance": "sequence", "capacity": 1.0}
MIDDLE = {"scheme": "hybrid_star", "overrides": {":": {"ffn": {"mid_norm": "default"}}}}


def experts(moe=PLAIN, scheme="hybrid_star", **changes):
    return tiny_config(scheme, model__layers=2, model__moe=moe, **changes)


LAYOUTS = {
    "dp2_zero3": (2, {"parallel__zero_stage": 3}),
    "ep2_dp4_zero0": (4, {"parallel__ep": 2, "parallel__zero_stage": 0}),
    "ep2_dp4_zero2": (4, {"parallel__ep": 2, "parallel__zero_stage": 2}),
    "ep4": (4, {"parallel__ep": 4}),
    "ep2_pp2_tied": (4, {"parallel__ep": 2, "parallel__pp": 2, "moe": BALANCED}),
    "ep2_tp2_sp": (4, {"parallel__ep": 2, "parallel__tp": 2, "parallel__sp": True, "model__bias": True, "moe": CAPPED,
                       "scheme": MIDDLE}),
    "ep2_cp2_recompute": (2, {"parallel__ep": 2, "parallel__cp": 2, "parallel__recompute": "full",
                              "model__bias": True, "moe": CAPPED, "scheme": MIDDLE}),
    "ep2_pp2_tp2_zero0": (8, {"parallel__ep": 2, "parallel__pp": 2, "parallel__tp": 2, "parallel__zero_stage": 0,
                              "moe": BALANCED}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_equals_one_process(layout):
    world, changes = LAYOUTS[layout]
    check(world, experts(**changes))


def only_first_experts(function, config):
    """``function(config)`` with a router that gives every token to experts 0 and 1."""
    from megnorm.model import router

    with ExitStack() as stack:
        swap(stack, router, "largest", lambda _: lambda scores, k: torch.arange(k).repeat(*scores.shape[:-1], 1))
        return function(config)


def test_a_rank_whose_experts_get_no_token():
    """It takes part in every collective; its experts have gradient zero."""
    config = experts(parallel__ep=2)
    alone = config.model_copy(update={"parallel": type(config.parallel)()})
    (expected,) = run_ranks(only_first_experts, 1, reference, alone)
    verdict = judge(expected, run_ranks(only_first_experts, 2, in_layout, config), make_layout(config, 2))
    assert verdict.agrees, "\n".join(verdict.faults)


# Faults

FAULTS = {}


def fault(world, **changes):
    def register(plant):
        FAULTS[plant.__name__] = (plant, world, changes)
        return plant
    return register


EP_ZERO0 = {"parallel__ep": 2, "parallel__zero_stage": 0}


@fault(2, **EP_ZERO0)
def experts_divided_by_their_replicas_only(stack):
    from deepspeed.runtime.engine import DeepSpeedEngine

    def scaled(reduce):
        def reduce_and_scale(self, gradients, size):
            reduce(self, gradients, size)
            for members in gradients.values():
                for gradient in members:
                    gradient *= 2
        return reduce_and_scale

    swap(stack, DeepSpeedEngine, "_reduce_expert_gradients", scaled)


@fault(2, parallel__ep=2)
def experts_summed_over_all_data_ranks(stack):
    from megnorm.plan.layout import Layout

    swap(stack, Layout, "expert_replicas", lambda _: lambda self: self.groups("dp"))


@fault(4, **EP_ZERO0)
def replicas_of_experts_counted_in_the_norm(stack):
    from megnorm.plan.layout import Layout

    swap(stack, Layout, "whole_models", lambda _: lambda self: [list(range(self.world))])


@fault(2, **EP_ZERO0)
def experts_of_other_ranks_left_out_of_the_norm(stack):
    from megnorm.parallel.groups import Groups

    swap(stack, Groups, "accounts_for", lambda _: lambda self, sharding: self.ep.rank == 0)


@fault(2)
def auxiliary_loss_not_divided_by_the_micro_batches(stack):
    _loss_scale(stack, lambda engine: 1.0)


@fault(2)
def auxiliary_loss_thrown_away(stack):
    _loss_scale(stack, lambda engine: 0.0)


@fault(2, parallel__cp=2)
def auxiliary_loss_averaged_over_context_ranks(stack):
    _loss_scale(stack, lambda engine: 1 / engine.accumulation)


def _loss_scale(stack, scale):
    from megnorm.engine.engine import Engine

    def changed(original):
        def init(self, *args):
            original(self, *args)
            self.routing.loss_scale = scale(self)
        return init

    swap(stack, Engine, "__init__", changed)


@fault(2, parallel__tp=2)
def routing_counted_on_every_tensor_rank(stack):
    from megnorm.engine import engine

    swap(stack, engine, "sum_over_tokens", lambda sums: lambda x, groups: sums(x, groups) * groups.layout.tp)


@fault(2, parallel__ep=2, moe={**BALANCED, "layers": "all"})
def balance_from_the_loads_of_one_rank(stack):
    from megnorm.engine import engine

    swap(stack, engine, "sum_over_tokens", lambda _: lambda x, groups: x)


@fault(2, parallel__recompute="full")
def routing_counted_again_when_recomputed(stack):
    from megnorm.model.router import Router

    def counted(losses):
        def count(self, *args):
            found = losses(self, *args)
            if torch.is_grad_enabled():
                self.routing.add(self.layer, found[1])
            return found
        return count

    swap(stack, Router, "losses", counted)


@fault(2, parallel__tp=2)
def gates_not_summed_over_tensor_ranks(stack):
    from megnorm.model.moe import MoE

    swap(stack, MoE, "forward", lambda _: lambda self, x, documents: self.tp.leave(
        self.routed(self.tp.enter(x), *self.router(x, documents))))


@fault(2, parallel__ep=2)
def same_draw_for_the_experts_of_all_ranks(stack):
    from megnorm.parallel.sharding import ExpertSlice, Sharding

    swap(stack, Sharding, "by_expert", lambda parts: lambda self: parts(
        self if self.experts is None else replace(self, experts=ExpertSlice(0, self.experts.count))))


def run_with_fault(name, config):
    plant = FAULTS[name][0]
    with ExitStack() as stack:
        plant(stack)
        return in_layout(config, phases=PHASES[:1])


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name):
    """In the first step, from equal weights."""
    _, world, changes = FAULTS[name]
    config = experts(**changes)
    try:
        ranks = run_ranks(run_with_fault, world, name, config)
    except RankFailed as failure:
        pytest.fail(f"the fault broke the run, which proves nothing:\n{failure}")
    assert judge(reference_of(config), ranks, make_layout(config, world)).faults
