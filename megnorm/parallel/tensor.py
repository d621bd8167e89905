"""The tensor-parallel region as a value: enter it from the hidden stream, leave it to the hidden stream.

``Alone`` is the region of one rank, in which every operation is the identity; modules never ask for a size.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megnorm.parallel import collectives
from megnorm.parallel.sharding import Sharding, new_parameter, sharding_of


class Alone:
    """A tensor-parallel group of one rank. ``sliced``: the hidden stream is cut over the ranks along the
    sequence, so that what acts on it has partial gradients."""

    rank = 0
    size = 1
    sliced = False

    def enter(self, x: Tensor) -> Tensor:
        """The hidden stream [b, s, d], about to be used by each rank's shard."""
        return x

    def leave(self, x: Tensor) -> Tensor:
        """Partial sums of each rank [b, s, d] to the hidden stream."""
        return x

    def statistic(self, x: Tensor) -> Tensor:
        """Sum of a statistic over the ranks' shards, for a norm over a sharded dimension."""
        return x

    def shared(self, parameter: nn.Parameter | None) -> Tensor | None:
        """A parameter at its use; where each copy's gradient is a share, the shares are summed."""
        return parameter

    def maximum(self, x: Tensor) -> Tensor:
        """Elementwise maximum over the ranks; not differentiable."""
        return x

    def parameter(self, name: str, shape: tuple[int, ...], *, dim: int | None = None, slices: int | None = None,
                  partial: bool = False, **about: Any) -> nn.Parameter:
        """This rank's part of a parameter: one of ``slices`` (default: as many as ranks) along ``dim``, or,
        without ``dim``, the whole. about: role and init. Copies of one slice have partial gradients."""
        count = (slices or self.size) if dim is not None else 1
        assert self.size % count == 0, (name, count, self.size)
        copies = self.size // count
        index, copy = divmod(self.rank, copies)
        partial = partial or (dim is not None and copies > 1)
        return new_parameter(Sharding(name, tuple(shape), dim=dim, index=index, count=count, first=copy == 0,
                                      partial=partial, **about))

    def on_stream(self, name: str, shape: tuple[int, ...], **about: Any) -> nn.Parameter:
        """A replicated parameter that acts on the hidden stream; use it through ``shared``."""
        return self.parameter(name, shape, partial=self.sliced, **about)


class TensorParallel(Alone):
    """A tensor-parallel group of several ranks (arXiv:1909.08053). ``copies``: groups of neighbouring ranks
    that hold copies of one slice, by their number of slices."""

    def __init__(self, group: dist.ProcessGroup, copies: dict[int, dist.ProcessGroup]):
        self.group = group
        self.copies = {1: group, **copies}
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
        return collectives.copy(parameter, self.copies[sharding_of(parameter).count])

    def maximum(self, x: Tensor) -> Tensor:
        y = x.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(y, op=dist.ReduceOp.MAX, group=self.group)
        return y


class SequenceParallel(TensorParallel):
    """Outside the region each rank holds a slice [b, s / tp, d] of the stream (arXiv:2205.05198)."""

    sliced = True

    def enter(self, x: Tensor) -> Tensor:
        return collectives.gather(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        return collectives.scatter(x, self.group)
