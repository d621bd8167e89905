"""Context parallelism by exchanging tokens for heads around the attention core (Ulysses, arXiv:2309.14509).

The ranks of a group hold adjacent parts of the same sequences. They are neighbours among the data-parallel
ranks, so the mean of gradients over these covers them too.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

Core = Callable[[Tensor, Tensor, Tensor], Tensor]


class WholeContext:
    """A group of one rank, which holds whole sequences."""

    rank = 0
    size = 1

    def around(self, core: Core) -> Core:
        """An attention core over whole sequences as one over the part of them that is here:
        q [b, h, s / n, e], k and v [b, k, s / n, e] -> [b, h, s / n, e]."""
        return core


class ContextParallel(WholeContext):
    """A group of several ranks; part ``rank`` of the sequence is here."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def around(self, core: Core) -> Core:
        def exchanged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.to_tokens(core(self.to_heads(q), self.to_heads(k), self.to_heads(v)))
        return exchanged

    def to_heads(self, x: Tensor) -> Tensor:
        """Part of the tokens of all heads [b, h, s / n, e] to all tokens of part of the heads [b, h / n, s, e]."""
        return _Exchange.apply(x, 1, 2, self.group)

    def to_tokens(self, x: Tensor) -> Tensor:
        """The inverse of ``to_heads``."""
        return _Exchange.apply(x, 2, 1, self.group)


class _Exchange(torch.autograd.Function):
    """Cut dimension ``cut`` into one piece per rank, send piece r to rank r, join what came along ``join``."""

    @staticmethod
    def forward(ctx, x, cut, join, group):
        ctx.cut, ctx.join, ctx.group = cut, join, group
        return _exchange(x, cut, join, group)

    @staticmethod
    def backward(ctx, grad):
        return _exchange(grad, ctx.join, ctx.cut, ctx.group), None, None, None


def _exchange(x: Tensor, cut: int, join: int, group: dist.ProcessGroup) -> Tensor:
    size = dist.get_world_size(group)
    pieces = torch.stack(x.chunk(size, cut))
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces, group=group)
    return torch.cat(received.unbind(0), join)
