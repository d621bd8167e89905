"""Matrix products of consecutive groups of rows, each with a matrix of its own; no padding."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def grouped_linear(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """rows [m, i] in n groups of ``counts`` [n] rows, weights [n, o, i] -> [m, o]: x W_e^T in group e.

    torch's grouped product where the device has one, else a product for each group.
    """
    in_one = rows.is_cuda and rows.dtype == torch.bfloat16
    return (by_torch if in_one else one_by_one)(rows, weights, counts)


def by_torch(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """One call; the counts stay on the device."""
    return F.grouped_mm(rows, weights.transpose(1, 2), offs=counts.cumsum(0, dtype=torch.int32))


def one_by_one(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """A product for each group, none padded."""
    return _OneByOne.apply(rows, weights, counts.tolist())


class _OneByOne(torch.autograd.Function):
    """dx = dy W_e, dW_e = dy^T x."""

    @staticmethod
    def forward(ctx, rows: Tensor, weights: Tensor, counts: list[int]) -> Tensor:
        ctx.save_for_backward(rows, weights)
        ctx.counts = counts
        out = rows.new_empty(len(rows), weights.shape[1])
        for x, w, y in zip(rows.split(counts), weights, out.split(counts), strict=True):
            torch.mm(x, w.t(), out=y)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights = ctx.saved_tensors
        d_rows, d_weights = torch.empty_like(rows), torch.empty_like(weights)
        groups = zip(grad.split(ctx.counts), rows.split(ctx.counts), d_rows.split(ctx.counts), weights, d_weights,
                     strict=True)
        for dy, x, dx, w, dw in groups:
            torch.mm(dy, w, out=dx)
            torch.mm(dy.t(), x, out=dw)
        return d_rows, d_weights, None
