"""The tensor-parallel region as a value: enter it with whole activations, leave it with whole activations.

``Alone`` is the region of one rank, in which every operation is the identity; modules never ask for a size.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megnorm.parallel import collectives
from megnorm.parallel.sharding import Sharding, new_parameter, sharding_of


class Alone:
    """A tensor-parallel group of one rank."""

    rank = 0
    size = 1

    def enter(self, x: Tensor) -> Tensor:
        """Whole activations, about to be used by each rank's shard."""
        return x

    def leave(self, x: Tensor) -> Tensor:
        """Partial sums of each rank to whole activations."""
        return x

    def statistic(self, x: Tensor) -> Tensor:
        """Sum of a statistic over the ranks' shards, for a norm over a sharded dimension."""
        return x

    def shared(self, parameter: nn.Parameter | None) -> Tensor | None:
        """A replicated parameter at its use; where each rank's gradient is a share, the shares are summed."""
        return parameter

    def maximum(self, x: Tensor) -> Tensor:
        """Elementwise maximum over the ranks; not differentiable."""
        return x

    def parameter(self, name: str, shape: tuple[int, ...], *, dim: int | None = None, **about) -> nn.Parameter:
        """A parameter of this rank: slice ``rank`` of ``size`` along ``dim`` of the whole, or the whole."""
        cut = {"dim": dim, "index": self.rank, "count": self.size} if dim is not None else {}
        return new_parameter(Sharding(name, tuple(shape), **cut, **about))


class TensorParallel(Alone):
    """A tensor-parallel group of several ranks."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def enter(self, x: Tensor) -> Tensor:
        return collectives.copy(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        return collectives.reduce(x, self.group)

    def statistic(self, x: Tensor) -> Tensor:
        return collectives.all_reduce(x, self.group)

    def shared(self, parameter: nn.Parameter | None) -> Tensor | None:
        if parameter is None or not sharding_of(parameter).partial:
            return parameter
        return collectives.copy(parameter, self.group)

    def maximum(self, x: Tensor) -> Tensor:
        y = x.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(y, op=dist.ReduceOp.MAX, group=self.group)
        return y
