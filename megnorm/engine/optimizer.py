"""Optimizer groups by weight decay, the same groups in the same order on every pipeline stage."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from megnorm.config.run import OptimizerConfig
from megnorm.engine import experts
from megnorm.parallel.groups import Groups
from megnorm.parallel.sharding import sharding_of


def is_decayed(parameter: nn.Parameter, config: OptimizerConfig) -> bool:
    """Whether weight decay acts on a parameter, by its role."""
    return {"matrix": True, "embedding": config.decay_embeddings, "norm": config.decay_norms,
            "bias": config.decay_biases}[sharding_of(parameter).role]


def parameter_groups(module: nn.Module, config: OptimizerConfig, groups: Groups) -> list[dict]:
    """By weight decay, and experts that are cut over ranks apart from the rest. DeepSpeed takes one collective per
    group, so a stage that lacks a group which another stage has would hang: such a stage gets a filler (see
    ``add_anchor``)."""
    members: dict[tuple[bool, bool], list[nn.Parameter]] = {
        (decayed, expert): [] for expert in (False, True) for decayed in (True, False)}
    for parameter in module.parameters():
        members[is_decayed(parameter, config), experts.is_marked(parameter)].append(parameter)
    used: list[list] = [[] for _ in range(groups.layout.pp)]
    dist.all_gather_object(used, [kind for kind, found in members.items() if found], group=groups.pp_group)
    everywhere = {kind for kinds in used for kind in kinds}
    return [{"params": found or [add_anchor(module, kind, groups)],
             "name": experts.group_name(groups) if kind[1] else "decay" if kind[0] else "no_decay",
             "moe": kind[1], "weight_decay": config.weight_decay if kind[0] else 0.0}
            for kind, found in members.items() if kind in everywhere]


def add_anchor(module: nn.Module, kind: tuple[bool, bool], groups: Groups) -> nn.Parameter:
    """A single zero that stays zero: it takes part in the collectives of a group that has no other member."""
    anchor = nn.Parameter(torch.zeros(1, device=next(module.parameters()).device))
    anchor.megnorm_anchor = True
    decayed, expert = kind
    if expert:
        experts.mark(anchor, groups)
    module.register_parameter(f"anchor_{'decay' if decayed else 'no_decay'}{'_experts' if expert else ''}", anchor)
    first = next(child for child in module.children() if any(True for _ in child.parameters()))
    first.register_forward_hook(lambda _module, _args, output: output + 0.0 * anchor.to(output.dtype).sum())
    return anchor


def adamw(config: OptimizerConfig) -> Callable[[list[dict]], torch.optim.Optimizer]:
    """AdamW (arXiv:1711.05101), fused: one pass over the parameters."""
    return lambda groups: torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
