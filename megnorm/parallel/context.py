"""Context parallelism by exchanging tokens for heads around the attention core (Ulysses, arXiv:2309.14509).

The ranks of a group hold adjacent parts of the same sequences. They are neighbours among the data-parallel
ranks, so the mean of gradients over these covers them too.
"""

import torch
import torch.distributed as dist
from torch import Tensor


class WholeContext:
    """A group of one rank, which holds whole sequences."""

    rank = 0
    size = 1

    def to_heads(self, x: Tensor) -> Tensor:
        """Part of the tokens of all heads [b, h, s / n, e] to all tokens of part of the heads [b, h / n, s, e]."""
        return x

    def to_tokens(self, x: Tensor) -> Tensor:
        """The inverse of ``to_heads``."""
        return x


class ContextParallel(WholeContext):
    """A group of several ranks; part ``rank`` of the sequence is here."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def to_heads(self, x: Tensor) -> Tensor:
        return _Exchange.apply(x, 1, 2, self.group)

    def to_tokens(self, x: Tensor) -> Tensor:
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
