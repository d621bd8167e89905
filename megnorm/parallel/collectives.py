"""Collectives as conjugate pairs for autograd: what the forward does to data, the backward does to gradients.

    copy        forward identity             backward all-reduce      (Megatron's f)
    reduce      forward all-reduce           backward identity        (Megatron's g)
    all_reduce  forward all-reduce           backward all-reduce      (a sum that every rank goes on to use)

None of them changes its input in place.
"""

import torch
import torch.distributed as dist
from torch import Tensor


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    y = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(y, group=group)
    return y


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


def copy(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Hand a whole tensor to ranks that each use it for their own shard."""
    return _Copy.apply(x, group)


def reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum the ranks' partial results into one whole result that every rank holds alike."""
    return _Reduce.apply(x, group)


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum a statistic of shards; each rank's shard depends on it, so its gradient is summed as well."""
    return _AllReduce.apply(x, group)
