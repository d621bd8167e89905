"""The whole gradient of a step, where DeepSpeed holds it: after its reduction, before clipping and the update."""

from collections.abc import Callable, Iterator

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from megnorm.engine.clip import counts_here, norms_of_rows
from megnorm.parallel.groups import Groups


def before_update(engine, look: Callable[[], None]) -> None:
    """Call ``look`` in every step of the plain or the pipeline engine, once all micro batches are accumulated
    and reduced. A hook on a parameter would see one micro batch of one replica."""
    update = engine._take_model_step

    def look_and_update(*args, **options):
        look()
        return update(*args, **options)

    engine._take_model_step = look_and_update


@torch.no_grad()
def squared_norms(engine, groups: Groups) -> dict[str, Tensor]:
    """By a parameter's global name: this rank's share (fp64 scalar) of the squared norm of its whole gradient,
    the mean over the global batch. The shares of all ranks sum to it. To be called within ``before_update``."""
    shares: dict[str, Tensor] = {}
    for parameter, gradient in _own_gradients(engine, groups):
        if counts_here(parameter):
            square = torch.linalg.vector_norm(norms_of_rows(gradient), dtype=torch.float64).square()
            name = parameter.sharding.name
            shares[name] = shares[name] + square if name in shares else square
    return shares


def _own_gradients(engine, groups: Groups) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """The parts of gradients that this rank and no replica of it accounts for."""
    optimizer = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        for number, members in enumerate(optimizer.fp16_groups):
            yield from zip(members, optimizer.averaged_gradients[number], strict=True)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):
        for number, members in enumerate(optimizer.params_in_partition):
            # The list may end with padding.
            yield from zip(members, optimizer.averaged_gradients[number], strict=False)
    elif groups.first_model:  # every whole model holds all of it
        yield from ((p, gradient) for p, gradient in _all_gradients(engine)
                    if counts_here(p) and groups.accounts_for(p.sharding))


def _all_gradients(engine) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Of an engine that doesn't cut gradients over data-parallel ranks."""
    optimizer = engine.optimizer
    if isinstance(optimizer, BF16_Optimizer):
        for members, gradients in zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients, strict=True):
            yield from zip(members, gradients, strict=True)
    else:
        assert optimizer is engine.basic_optimizer, f"no rule for {type(optimizer).__name__}"
        yield from ((p, p.grad) for p in engine.module.parameters() if p.grad is not None)
