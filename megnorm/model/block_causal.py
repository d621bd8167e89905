"""Causal attention on a CPU, as batched matrix products over blocks of queries.

    P_i = softmax(scale Q_i K_j^T + mask),  C_i = P_i V_j        i: queries of one block, j: keys up to its last

    dV_j += P_i^T dC_i
    dS_i  = P_i * (dP_i - sum_j P_i dP_i),  dP_i = dC_i V_j^T
    dQ_i  = scale dS_i K_j,  dK_j += scale dS_i^T Q_i

Where rows hold several documents, j begins with the first position that any query of the block sees.

torch's own kernel for CPUs reaches a third of the speed of a matrix product and gains nothing from bf16. Scores
and softmax are in fp32 at least, so are the sums dK and dV; P and dP are in the dtype of the input. P is kept: memory
grows with the square of the sequence, of which half is skipped, and so the advantage ends at LONGEST.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 64
LONGEST = 1024


def block_causal(q: Tensor, k: Tensor, v: Tensor, scale: float, begins: Tensor | None = None) -> Tensor:
    """q [b, h, s, e], k and v [b, k, s, e] with h a multiple of k -> [b, h, s, e].

    begins i64 [b, s], never falling along a row: the first position that each one sees (None: 0).
    """
    b, h, s, e = q.shape
    groups = k.shape[1]
    # Rows of one kv head: position by position, the heads that share it; so a block of positions is one matrix.
    rows = q.unflatten(1, (groups, -1)).transpose(2, 3).reshape(b * groups, -1, e)
    context = _BlockCausal.apply(rows, k.reshape(b * groups, s, e), v.reshape(b * groups, s, e), scale, begins)
    return context.view(b, groups, s, -1, e).transpose(2, 3).flatten(1, 2)


class _BlockCausal(torch.autograd.Function):
    """q [n, s g, e] (row p g + i: query i of position p), k and v [n, s, e] -> [n, s g, e]."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, scale: float, begins: Tensor | None) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        scaled, keys, later = q.to(wide) * scale, k.to(wide), _later(q, k)
        context, weights, blocks = torch.empty_like(q), [], _blocks(q, k, begins)
        for block in blocks:
            scores = torch.bmm(scaled[:, block.rows], keys[:, block.seen].transpose(1, 2))
            own = scores[:, :, block.first - block.seen.start:]
            own.masked_fill_(later[:own.shape[1], :own.shape[2]], -torch.inf)
            if block.mixed > block.seen.start:
                _hide(scores, block, begins)
            weights.append(torch.softmax(scores, -1).to(q.dtype))
            torch.bmm(weights[-1], v[:, block.seen], out=context[:, block.rows])
        ctx.scale, ctx.blocks = scale, blocks
        ctx.save_for_backward(q, k, v, *weights)
        return context

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *weights = ctx.saved_tensors
        grad = grad.contiguous()
        dq = torch.empty_like(q)
        dk, dv = torch.zeros(2, *k.shape, dtype=torch.promote_types(k.dtype, torch.float32), device=k.device)
        for p, block in zip(weights, ctx.blocks, strict=True):
            rows, seen = block.rows, block.seen
            dc = grad[:, rows]
            dv[:, seen] += torch.bmm(p.transpose(1, 2), dc)
            dp = torch.bmm(dc, v[:, seen].transpose(1, 2))
            ds = torch._softmax_backward_data(dp, p, -1, p.dtype)
            torch.bmm(ds, k[:, seen], out=dq[:, rows])
            dk[:, seen] += torch.bmm(ds.transpose(1, 2), q[:, rows])
        return dq.mul_(ctx.scale), dk.mul_(ctx.scale).to(k.dtype), dv.to(v.dtype), None, None


class Block(NamedTuple):
    """Queries of the positions from ``first`` on. rows: of q. seen: the positions that any of them sees, of which
    those before ``mixed`` are not seen by all."""

    rows: slice
    first: int
    seen: slice
    mixed: int


def _blocks(q: Tensor, k: Tensor, begins: Tensor | None) -> list[Block]:
    length, per = k.shape[1], q.shape[1] // k.shape[1]
    earliest, latest = ([0] * length,) * 2 if begins is None else (begins.amin(0).tolist(), begins.amax(0).tolist())
    ends = [(first, min(first + BLOCK, length)) for first in range(0, length, BLOCK)]
    return [Block(slice(first * per, end * per), first, slice(earliest[first], end), latest[end - 1])
            for first, end in ends]


def _hide(scores: Tensor, block: Block, begins: Tensor) -> None:
    """Take the positions before the beginning of a query's document out of the block's scores [n, rows, seen]."""
    places = torch.arange(block.seen.start, block.mixed, device=scores.device)
    before = places < begins[:, block.first:block.seen.stop, None]  # [b, positions, places]
    by_position = scores.unflatten(0, (len(begins), -1)).unflatten(2, (before.shape[1], -1))
    by_position[..., :len(places)].masked_fill_(before[:, None, :, None], -torch.inf)


def _later(q: Tensor, k: Tensor) -> Tensor:
    """Within a block [rows, positions]: the keys that stand after a row's position."""
    size, per = min(BLOCK, k.shape[1]), q.shape[1] // k.shape[1]
    return torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1).repeat_interleave(per, 0)
