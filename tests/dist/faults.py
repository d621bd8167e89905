"""Faults of the kinds that public reports describe, each planted by a patch in the ranks' processes."""

from collections.abc import Callable
from contextlib import ExitStack
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megnorm.testing.parity import in_layout

FAULTS: dict[str, Callable[[ExitStack], None]] = {}


def fault(plant: Callable[[ExitStack], None]) -> Callable[[ExitStack], None]:
    FAULTS[plant.__name__] = plant
    return plant


def run_with_fault(name: str, config, phases) -> dict:
    """On a rank: the measured training with a fault planted ("" for none)."""
    with ExitStack() as stack:
        if name:
            FAULTS[name](stack)
        return in_layout(config, phases=phases)


def swap(stack: ExitStack, owner, name: str, make: Callable) -> None:
    """Replace ``owner.name`` by ``make(original)``."""
    original = owner.__dict__[name] if isinstance(owner, type) else getattr(owner, name)
    stack.enter_context(patch.object(owner, name, make(original)))


def _region():
    from megnorm.parallel.tensor import SequenceParallel, TensorParallel

    return TensorParallel, SequenceParallel


@fault
def gain_not_summed(stack):
    swap(stack, _region()[0], "shared", lambda _: lambda self, parameter: parameter)


@fault
def gain_summed_twice(stack):
    swap(stack, _region()[0], "shared", lambda shared: lambda self, parameter: (
        parameter if parameter is None or not parameter.sharding.partial
        else _copied(shared(self, parameter), self)))


def _copied(x, tp):
    from megnorm.parallel import collectives

    return collectives.copy(x, tp.group)


@fault
def gain_averaged(stack):
    swap(stack, _region()[0], "shared", lambda shared: lambda self, parameter: (
        parameter if parameter is None or not parameter.sharding.partial
        else _scaled_gradient(shared(self, parameter), 1 / self.size)))


def _scaled_gradient(x, factor):
    return x.detach() + factor * (x - x.detach())


@fault
def final_norm_forgotten_under_sp(stack):
    swap(stack, _region()[0], "shared", lambda shared: lambda self, parameter: (
        parameter if parameter is not None and parameter.sharding.name == "final_norm.gain"
        else shared(self, parameter)))


@fault
def key_copies_not_summed(stack):
    swap(stack, _region()[0], "shared", lambda shared: lambda self, parameter: (
        parameter if parameter is not None and parameter.sharding.dim is not None else shared(self, parameter)))


@fault
def statistic_of_one_rank(stack):
    swap(stack, _region()[0], "statistic", lambda _: lambda self, x: x * self.size)


@fault
def statistic_without_backward_sum(stack):
    from megnorm.parallel import collectives

    swap(stack, _region()[0], "statistic", lambda _: lambda self, x: collectives.reduce(x, self.group))


@fault
def input_gradient_not_summed(stack):
    swap(stack, _region()[0], "enter", lambda _: lambda self, x: x)


@fault
def residual_after_enter(stack):
    from megnorm.model.block import Sublayer

    def step(self, x, *about):
        h = self.body.tp.enter(self.in_norm(x))
        r = h if self.residual_from == "normed" else x
        branch = self.branch_scale(self.out_norm(self.body(h, *about)))
        return self.post_norm(self.residual_scale(r) + branch), branch

    swap(stack, Sublayer, "step", lambda _: step)


@fault
def bias_on_every_rank(stack):
    from megnorm.parallel.linear import RowLinear

    swap(stack, RowLinear, "forward", lambda _: lambda self, x: self.tp.leave(F.linear(x, self.weight, self.bias)))


@fault
def world_group_in_collectives(stack):
    from megnorm.parallel import collectives

    swap(stack, collectives, "_summed", lambda summed: lambda x, group: summed(x, dist.group.WORLD))


@fault
def layer_number_local_to_the_stage(stack):
    from megnorm.model import decoder

    swap(stack, decoder, "Block", with_slots_of_the_local_number)


def with_slots_of_the_local_number(block):
    """Blocks with the slots of their number within a stage of two layers."""
    from megnorm.norms import placement_of

    class Local(block):
        def __init__(self, layer, slots, streams, common):
            super().__init__(layer, placement_of(common.model).blocks[layer % 2], streams, common)

    return Local


@fault
def initial_depth_local_to_the_stage(stack):
    from megnorm.model import init

    swap(stack, init, "_normal_slice", lambda draw: lambda sharding, normal, seed: draw(
        sharding.__class__(**{**sharding.__dict__, "name": sharding.name.replace("layers.2", "layers.0")}),
        normal, seed))


@fault
def same_draw_for_all_shards(stack):
    from megnorm.model import init

    swap(stack, init, "_normal_slice", lambda draw: lambda sharding, normal, seed: draw(
        sharding.__class__(**{**sharding.__dict__, "index": 0}), normal, seed))


@fault
def mean_over_own_tokens(stack):
    from megnorm.model.loss import TokenLoss

    swap(stack, TokenLoss, "__call__", lambda call: lambda self, logits, labels: call(
        self, logits, (labels[0], (labels[1] > 0) / (labels[1] > 0).sum().clamp(min=1))))


@fault
def shards_not_marked_for_the_norm(stack):
    from megnorm.engine.engine import Engine

    def init(original):
        def unmarked(self, module, *rest):
            original(self, module, *rest)
        return unmarked

    swap(stack, Engine, "__init__", init)
    from deepspeed.runtime import utils
    from deepspeed.runtime.zero import stage_1_and_2

    for owner in (utils, stage_1_and_2):
        swap(stack, owner, "is_model_parallel_parameter", lambda _: lambda parameter: False)


@fault
def replicas_counted_in_the_norm(stack):
    from deepspeed.runtime.zero import stage_1_and_2

    swap(stack, stage_1_and_2, "is_model_parallel_parameter", lambda _: lambda parameter: True)


@fault
def tied_copy_counted_twice(stack):
    from megnorm.engine import clip

    swap(stack, clip, "counts_here", lambda _: lambda parameter: parameter.sharding.first)


@fault
def tied_gradient_not_summed(stack):
    from deepspeed.runtime.pipe.engine import PipelineEngine

    swap(stack, PipelineEngine, "_exec_reduce_tied_grads", lambda _: lambda self: None)
    stack.callback(PipelineEngine._INSTRUCTION_MAP.update, dict(PipelineEngine._INSTRUCTION_MAP))
    for instruction, method in list(PipelineEngine._INSTRUCTION_MAP.items()):
        if instruction.__name__ == "ReduceTiedGrads":
            PipelineEngine._INSTRUCTION_MAP[instruction] = PipelineEngine._exec_reduce_tied_grads
            assert method is not PipelineEngine._exec_reduce_tied_grads


@fault
def gradients_summed_over_replicas(stack):
    from megnorm.testing import parity

    swap(stack, parity, "micro_batches", lambda share: lambda config, groups, step: [
        (tokens, targets, weights * groups.layout.replicas) for tokens, targets, weights in
        share(config, groups, step)])


@fault
def decay_of_everything(stack):
    from megnorm.engine import optimizer

    swap(stack, optimizer, "is_decayed", lambda _: lambda parameter, config: True)


@fault
def positions_from_zero_on_each_context_rank(stack):
    from megnorm.model.rotary import Rotary

    swap(stack, Rotary, "__init__", lambda init: lambda self, head_size, theta, part=0: init(self, head_size, theta))


@fault
def later_stages_ignore_documents(stack):
    from megnorm.engine.pipeline import Stage

    swap(stack, Stage, "forward", lambda forward: lambda self, inputs: (
        forward(self, inputs) if self.stage_id == 0 else forward(self, inputs[0])))


@fault
def context_ranks_take_documents_for_their_own_part(stack):
    from megnorm.model.documents import Documents

    swap(stack, Documents, "__init__", lambda init: lambda self, positions, ids: init(
        self, positions, ids[:, :positions.shape[1]].repeat(1, ids.shape[1] // positions.shape[1])))


@fault
def one_replica_drifts(stack):
    from megnorm.testing import parity

    def moved(perturb):
        def perturb_and_drift(parameters):
            parameters = list(parameters)
            perturb(parameters)
            if dist.get_rank() == 1:
                gain = next(p for p in parameters if p.sharding.role == "norm")
                with torch.no_grad():
                    gain += 1e-3
        return perturb_and_drift

    swap(stack, parity, "perturb", moved)
