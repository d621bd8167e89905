"""Cross entropy over logits whose vocabulary is split over tensor-parallel ranks."""

import torch
from torch import Tensor

from megnorm.parallel.tensor import Alone

# Elements that are worked on at once on a CPU, so that they stay in its cache: 2 MiB of fp32.
CHUNK = 2**19


class _CrossEntropy(torch.autograd.Function):
    """-log softmax(logits)[target] and log Z, over the first ``vocab`` columns of all ranks, in fp32.

    The forward keeps p, proportional to the softmax in each row, so that the exponentials are taken once; the
    backward is one pass: p * share - onehot(target) * grad.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, vocab: int, tp: Alone) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        width = logits.shape[-1]
        first = tp.rank * width
        real = max(0, min(width, vocab - first))
        rows, local = logits.reshape(-1, width), targets.reshape(-1, 1) - first
        top, scale, total, p = _row_softmax(rows[:, :real], keep=ctx.needs_input_grad[0])
        highest = tp.maximum(top)
        elsewhere = (local < 0) | (local >= real)
        local = local.masked_fill(elsewhere, 0)
        target_score = (rows.gather(-1, local) - highest).masked_fill(elsewhere, 0.0)
        scale = scale * torch.exp(top - highest)
        total, target_score = tp.statistic(torch.stack((scale * total, target_score)))
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(p, scale / total, local, ~elsewhere)
            ctx.width, ctx.dtype = width, logits.dtype
        log_sum = total.log()
        return (log_sum - target_score).view(targets.shape), (log_sum + highest).view(targets.shape)

    @staticmethod
    def backward(ctx, grad: Tensor | None, grad_log_z: Tensor | None):
        p, share, local, here = ctx.saved_tensors
        grads = [g.reshape(-1, 1) for g in (grad, grad_log_z) if g is not None]
        share = share * sum(grads)
        at_target = here * -grad.reshape(-1, 1) if grad is not None else torch.zeros_like(share)
        slope = p.new_empty(len(p), ctx.width, dtype=ctx.dtype)
        slope[:, p.shape[1]:] = 0
        for z in _chunks(p):
            slope[z, :p.shape[1]] = (p[z] * share[z]).scatter_add_(-1, local[z], at_target[z])
        return slope.view(*(grad if grad is not None else grad_log_z).shape, ctx.width), None, None, None


def _row_softmax(scores: Tensor, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """top, scale, total [n, 1] and p [n, v] (if kept) of scores [n, v]: exp(scores - top) = scale * p, and
    total = sum(p). torch's softmax is its fastest exponential; its own sum is too coarse to be relied on."""
    wide = torch.promote_types(scores.dtype, torch.float32)
    n, v = scores.shape
    top, scale, total = scores.new_empty(3, n, 1, dtype=wide)
    if v == 0:  # only padding on this rank
        return top.fill_(-torch.inf), scale.zero_(), total.zero_(), scores.to(wide)
    kept = scores.new_empty(n, v, dtype=wide) if keep else None
    for z in _chunks(scores):
        x = scores[z].to(wide)
        p = torch.softmax(x, -1, out=kept[z] if keep else None)
        top[z] = x.amax(-1, keepdim=True)
        scale[z] = 1 / p.amax(-1, keepdim=True)
        total[z] = p.sum(-1, keepdim=True)
    return top, scale, total, kept


def _chunks(rows: Tensor) -> list[slice]:
    """Slices of rows [n, v] to be worked on at once; on a GPU that is all of them."""
    n, v = rows.shape
    if v == 0:  # only padding on this rank
        return []
    step = max(1, CHUNK // v) if rows.device.type == "cpu" else max(n, 1)
    return [slice(start, start + step) for start in range(0, n, step)]


def cross_entropy(logits: Tensor, targets: Tensor, vocab: int, tp: Alone) -> Tensor:
    """Nats of each target, see ``nats_and_log_z``."""
    return nats_and_log_z(logits, targets, vocab, tp)[0]


def nats_and_log_z(logits: Tensor, targets: Tensor, vocab: int, tp: Alone) -> tuple[Tensor, Tensor]:
    """Nats of each target, and log Z = log sum exp of the scores.

    logits [..., v_padded / tp], targets [...] with ids below ``vocab`` -> [...], [...]. The padding columns
    (ids from ``vocab`` on) have no share in the softmax and no gradient.
    """
    return _CrossEntropy.apply(logits, targets, vocab, tp)
