"""Start values of learned residual factors, measured in a forward pass (Admin, arXiv:2004.08249)."""

import math
from collections.abc import Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megnorm.config import ModelConfig
from megnorm.model.block import Block, Sublayer
from megnorm.model.decoder import Inputs
from megnorm.model.scale import LearnedScale
from megnorm.norms import placement_of
from megnorm.parallel.groups import Groups


class Moments:
    """Count, sum and sum of squares of all elements of the tensors that went by."""

    def __init__(self) -> None:
        self.sums = torch.zeros(3, dtype=torch.float64)

    def see(self, x: Tensor) -> None:
        wide = x.detach().double()
        self.sums += torch.stack((wide.new_tensor(x.numel()), wide.sum(), wide.square().sum())).cpu()


@torch.no_grad()
def profile(module: nn.Module, layers: int, micro_batches: Iterable[Inputs], groups: Groups) -> None:
    """Set each profiled factor w_s of the sublayers s = 1 .. 2 ``layers`` of this rank's part of a model.

    With every such factor 1, the inputs of the micro batches pass through the whole model; then w_1 = 1
    and w_{s+1} = sqrt(w_s^2 Var x_s + Var f_s), with x_s the residual and f_s the branch of sublayer s. The
    variances are over all elements of the global batch, so every layout finds the same up to rounding. A
    collective call of all ranks.
    """
    own = _sublayers(module)
    for sublayer in own.values():
        if _profiled(sublayer):
            sublayer.residual_scale.factor.fill_(1.0)
    residuals, branches = ([Moments() for _ in range(2 * layers)] for _ in range(2))
    hooks = [sublayer.residual_scale.register_forward_pre_hook(partial(_see, residuals[s]))
             for s, sublayer in own.items()]
    hooks += [sublayer.branch_scale.register_forward_hook(partial(_see_output, branches[s]))
              for s, sublayer in own.items()]
    for inputs in micro_batches:
        _pass_on(module, inputs, groups)
    for hook in hooks:
        hook.remove()
    factors = [1.0]
    for of_x, of_f in zip(_variances(residuals, groups), _variances(branches, groups), strict=True):
        factors.append(math.sqrt(factors[-1] ** 2 * of_x + of_f))
    for s, sublayer in own.items():
        if _profiled(sublayer):
            sublayer.residual_scale.factor.fill_(factors[s])


def _see(moments: Moments, _module: nn.Module, args: tuple[Tensor]) -> None:
    moments.see(args[0])


def _see_output(moments: Moments, _module: nn.Module, _args: tuple[Tensor], output: Tensor) -> None:
    moments.see(output)


def _sublayers(module: nn.Module) -> dict[int, Sublayer]:
    """This rank's sublayers by number: 0, 1 in the first block, 2, 3 in the second."""
    blocks = [child for child in module.modules() if isinstance(child, Block)]
    return {2 * block.layer + place: sublayer for block in blocks
            for place, sublayer in enumerate((block.attention, block.ffn))}


def _profiled(sublayer: Sublayer) -> bool:
    return isinstance(sublayer.residual_scale, LearnedScale) and sublayer.residual_scale.profiled


def _pass_on(module: nn.Module, inputs: Inputs, groups: Groups) -> None:
    """One micro batch through the stages, one after the other; each knows itself where the documents lie."""
    stage, last = groups.at.pp, groups.layout.pp - 1
    x, *rows = inputs if isinstance(inputs, tuple) else (inputs,)
    x = x if stage == 0 else _receive(groups, stage - 1)
    y = module((x, *rows) if rows else x)
    if stage < last:
        _send(y[0] if rows else y, groups, stage + 1)


def _send(x: Tensor, groups: Groups, stage: int) -> None:
    to = dist.get_global_rank(groups.pp_group, stage)
    dist.send(torch.tensor(x.shape, device=x.device), to, group=groups.pp_group)
    dist.send(x.contiguous(), to, group=groups.pp_group)


def _receive(groups: Groups, stage: int) -> Tensor:
    source = dist.get_global_rank(groups.pp_group, stage)
    shape = torch.empty(3, dtype=torch.int64, device=groups.device)
    dist.recv(shape, source, group=groups.pp_group)
    x = torch.empty(*shape.tolist(), device=groups.device)
    dist.recv(x, source, group=groups.pp_group)
    return x


def _variances(seen: list[Moments], groups: Groups) -> list[float]:
    """Over the elements of all ranks; tensor-parallel ranks that see the same ones count alike."""
    sums = torch.stack([moments.sums for moments in seen]).to(groups.device)
    for group in (groups.tp_group, groups.dp_group, groups.pp_group):
        dist.all_reduce(sums, group=group)
    count, total, squares = sums.cpu().unbind(-1)
    return (squares / count - (total / count) ** 2).tolist()


def has_profiled_scales(model: ModelConfig) -> bool:
    """Whether any factor of the placement is to be measured."""
    return any(sublayer.residual_scale.profiled for block in placement_of(model).blocks
               for sublayer in (block.attention, block.ffn))
