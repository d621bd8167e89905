"""Collectives as conjugate pairs for autograd: what the forward does to data, the backward does to gradients.

    copy        forward identity             backward all-reduce      (Megatron's f)
    reduce      forward all-reduce           backward identity        (Megatron's g)
    all_reduce  forward all-reduce           backward all-reduce      (a sum that every rank goes on to use)
    gather      forward all-gather           backward reduce-scatter  (sequence parallel, arXiv:2205.05198: g)
    scatter     forward reduce-scatter       backward all-gather      (its conjugate)

gather and scatter work along dimension 1, the sequence: [b, s / n, ...] to [b, s, ...] and back.

None of them changes its input in place.
"""

import torch
import torch.distributed as dist
from torch import Tensor


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    y = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(y, group=group)
    return y


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[b, s / n, ...] of each rank to [b, s, ...]."""
    size = dist.get_world_size(group)
    parts = x.new_empty((size * x.shape[0], *x.shape[1:]))
    dist.all_gather_single(parts, x.contiguous(), group=group)
    return parts.unflatten(0, (size, -1)).movedim(0, 1).flatten(1, 2)


def _scattered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks of [b, s, ...], of which each rank keeps its own [b, s / n, ...]."""
    size = dist.get_world_size(group)
    parts = x.unflatten(1, (size, -1)).movedim(1, 0).flatten(0, 1).contiguous()
    own = x.new_empty((x.shape[0], x.shape[1] // size, *x.shape[2:]))
    dist.reduce_scatter_single(own, parts, group=group)
    return own


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return _summed(grad, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return _summed(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _summed(x, group)

    @staticmethod
    def backward(ctx, grad):
        return _summed(grad, ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx, grad):
        return _scattered(grad, ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _scattered(x, group)

    @staticmethod
    def backward(ctx, grad):
        return _gathered(grad, ctx.group), None


def copy(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Hand a whole tensor to ranks that each use it for their own shard."""
    return _Copy.apply(x, group)


def reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum the ranks' partial results into one whole result that every rank holds alike."""
    return _Reduce.apply(x, group)


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum a statistic of shards; each rank's shard depends on it, so its gradient is summed as well."""
    return _AllReduce.apply(x, group)


def gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Put the ranks' slices of the sequence together, for ranks that each use all of it for their own shard."""
    return _Gather.apply(x, group)


def scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum the ranks' partial results; each rank keeps its slice of the sequence."""
    return _Scatter.apply(x, group)
