"""Optimizer groups by weight decay, the same groups in the same order on every pipeline stage."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from megnorm.config.run import OptimizerConfig
from megnorm.parallel.sharding import sharding_of


def is_decayed(parameter: nn.Parameter, config: OptimizerConfig) -> bool:
    """Whether weight decay acts on a parameter, by its role."""
    return {"matrix": True, "embedding": config.decay_embeddings, "norm": config.decay_norms,
            "bias": config.decay_biases}[sharding_of(parameter).role]


def parameter_groups(module: nn.Module, config: OptimizerConfig, stages: dist.ProcessGroup) -> list[dict]:
    """Groups "decay" and "no_decay". DeepSpeed takes one collective per group, so a stage that lacks a group
    which another stage has would hang: such a stage gets a filler (see ``add_anchor``)."""
    groups: dict[str, list[nn.Parameter]] = {"decay": [], "no_decay": []}
    for parameter in module.parameters():
        groups["decay" if is_decayed(parameter, config) else "no_decay"].append(parameter)
    used: list[list[str]] = [[] for _ in range(dist.get_world_size(stages))]
    dist.all_gather_object(used, [name for name, members in groups.items() if members], group=stages)
    everywhere = {name for names in used for name in names}
    return [{"params": members or [add_anchor(module, name)], "name": name,
             "weight_decay": config.weight_decay if name == "decay" else 0.0}
            for name, members in groups.items() if name in everywhere]


def add_anchor(module: nn.Module, name: str) -> nn.Parameter:
    """A single zero that stays zero: it takes part in the collectives of a group that has no other member."""
    anchor = nn.Parameter(torch.zeros(1, device=next(module.parameters()).device))
    anchor.megnorm_anchor = True
    module.register_parameter(f"anchor_{name}", anchor)
    first = next(child for child in module.children() if any(True for _ in child.parameters()))
    first.register_forward_hook(lambda _module, _args, output: output + 0.0 * anchor.to(output.dtype).sum())
    return anchor


def adamw(config: OptimizerConfig) -> Callable[[list[dict]], torch.optim.Optimizer]:
    """AdamW (arXiv:1711.05101), fused: one pass over the parameters."""
    return lambda groups: torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
