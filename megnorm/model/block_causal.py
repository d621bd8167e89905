"""Causal attention on a CPU, as batched matrix products over blocks of queries.

    P_i = softmax(scale Q_i K_j^T + mask),  C_i = P_i V_j        i: queries of one block, j: keys up to its last

    dV_j += P_i^T dC_i
    dS_i  = P_i * (dP_i - sum_j P_i dP_i),  dP_i = dC_i V_j^T
    dQ_i  = scale dS_i K_j,  dK_j += scale dS_i^T Q_i

torch's own kernel for CPUs reaches a third of the speed of a matrix product and gains nothing from bf16. Scores
and softmax are in fp32 at least, so are the sums dK and dV; P and dP are in the dtype of the input. P is kept: memory
grows with the square of the sequence, of which half is skipped, and so the advantage ends at LONGEST.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 64
LONGEST = 1024


def block_causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q [b, h, s, e], k and v [b, k, s, e] with h a multiple of k -> [b, h, s, e]."""
    b, h, s, e = q.shape
    groups = k.shape[1]
    # Rows of one kv head: position by position, the heads that share it; so a block of positions is one matrix.
    rows = q.unflatten(1, (groups, -1)).transpose(2, 3).reshape(b * groups, -1, e)
    context = _BlockCausal.apply(rows, k.reshape(b * groups, s, e), v.reshape(b * groups, s, e), scale)
    return context.view(b, groups, s, -1, e).transpose(2, 3).flatten(1, 2)


class _BlockCausal(torch.autograd.Function):
    """q [n, s g, e] (row p g + i: query i of position p), k and v [n, s, e] -> [n, s g, e]."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        scaled, keys, later = q.to(wide) * scale, k.to(wide), _later(q, k)
        context, weights = torch.empty_like(q), []
        for rows, first, last in _blocks(q, k):
            scores = torch.bmm(scaled[:, rows], keys[:, :last].transpose(1, 2))
            scores[:, :, first:].masked_fill_(later[:scores.shape[1], :last - first], -torch.inf)
            weights.append(torch.softmax(scores, -1).to(q.dtype))
            torch.bmm(weights[-1], v[:, :last], out=context[:, rows])
        ctx.scale = scale
        ctx.save_for_backward(q, k, v, *weights)
        return context

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *weights = ctx.saved_tensors
        grad = grad.contiguous()
        dq = torch.empty_like(q)
        dk, dv = torch.zeros(2, *k.shape, dtype=torch.promote_types(k.dtype, torch.float32), device=k.device)
        for p, (rows, _, last) in zip(weights, _blocks(q, k), strict=True):
            dc = grad[:, rows]
            dv[:, :last] += torch.bmm(p.transpose(1, 2), dc)
            dp = torch.bmm(dc, v[:, :last].transpose(1, 2))
            ds = torch._softmax_backward_data(dp, p, -1, p.dtype)
            torch.bmm(ds, k[:, :last], out=dq[:, rows])
            dk[:, :last] += torch.bmm(ds.transpose(1, 2), q[:, rows])
        return dq.mul_(ctx.scale), dk.mul_(ctx.scale).to(k.dtype), dv.to(v.dtype), None


def _blocks(q: Tensor, k: Tensor) -> list[tuple[slice, int, int]]:
    """(rows of q, first position, end of the positions) of each block."""
    length, per = k.shape[1], q.shape[1] // k.shape[1]
    starts = range(0, length, BLOCK)
    return [(slice(i * per, min(i + BLOCK, length) * per), i, min(i + BLOCK, length)) for i in starts]


def _later(q: Tensor, k: Tensor) -> Tensor:
    """Within a block [rows, positions]: the keys that stand after a row's position."""
    size, per = min(BLOCK, k.shape[1]), q.shape[1] // k.shape[1]
    return torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1).repeat_interleave(per, 0)
