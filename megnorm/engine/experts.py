"""What DeepSpeed is told of expert parallelism, so that it sums and counts experts over the right ranks.

A parameter that it takes for an expert's has its gradient summed over the ranks that hold the same experts, and
divided by all data-parallel ranks: the experts have seen the tokens of all of them.
"""

from deepspeed.moe.layer import MoE
from deepspeed.utils import groups as registry
from torch import nn

from megnorm.parallel.groups import Groups
from megnorm.parallel.sharding import sharding_of


class _Sign(MoE):
    """DeepSpeed looks for a layer of its own class before it asks any parameter whether it is an expert's."""

    def __init__(self, experts: int):
        nn.Module.__init__(self)
        self.num_experts = experts

    def set_deepspeed_parallelism(self, *_: bool) -> None:
        """The groups are made already."""


def announce(module: nn.Module, groups: Groups) -> None:
    """Mark the experts' parameters, on every pipeline stage alike, and hand over the groups.

    Where every rank holds all experts they are parameters like others, and DeepSpeed knows of none.
    """
    # Of the engine before in this process, whose groups may be gone.
    registry._EXPERT_PARALLEL_GROUP, registry._EXPERT_DATA_PARALLEL_GROUP = {}, {}
    if groups.ep.size == 1:
        return
    name = group_name(groups)
    registry._EXPERT_PARALLEL_GROUP[name] = groups.ep.group
    registry._EXPERT_DATA_PARALLEL_GROUP[name] = groups.expert_dp_group
    registry.expert_tensor_parallel_world_size = groups.layout.tp
    module.add_module("expert_parallel", _Sign(groups.ep.size))
    for parameter in module.parameters():
        if sharding_of(parameter).experts is not None:
            mark(parameter, groups)


def mark(parameter: nn.Parameter, groups: Groups) -> None:
    """Let DeepSpeed take the parameter for an expert's."""
    parameter.allreduce = False
    parameter.group_name = group_name(groups)


def is_marked(parameter: nn.Parameter) -> bool:
    """Whether DeepSpeed takes the parameter for an expert's."""
    return not getattr(parameter, "allreduce", True)


def group_name(groups: Groups) -> str:
    """DeepSpeed reads the size out of the name."""
    return f"ep_size_{groups.ep.size}"
