"""Cross entropy over logits whose vocabulary is split over tensor-parallel ranks."""

import torch
from torch import Tensor

from megnorm.parallel.tensor import Alone


class _CrossEntropy(torch.autograd.Function):
    """-log softmax(logits)[target] and log Z, over the first ``vocab`` columns of all ranks, in fp32.

    The forward also forms softmax - onehot(target), so that the exponentials are taken once.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, vocab: int, tp: Alone) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        width = logits.shape[-1]
        first = tp.rank * width
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
        real = max(0, min(width, vocab - first))
        if real < width:
            padding = torch.arange(width, device=logits.device) >= real
            scores = scores.masked_fill(padding, float("-inf"))
        top = tp.maximum(scores.amax(-1, keepdim=True))
        scores = scores - top
        local = targets - first
        elsewhere = (local < 0) | (local >= real)
        local = local.masked_fill(elsewhere, 0).unsqueeze(-1)
        target_score = scores.gather(-1, local).squeeze(-1).masked_fill(elsewhere, 0.0)
        scores.exp_()
        both = tp.statistic(torch.stack((scores.sum(-1), target_score)))
        total, target_score = both[0], both[1]
        if logits.requires_grad or ctx.needs_input_grad[0]:
            scores.div_(total.unsqueeze(-1))
            one = (~elsewhere).to(scores.dtype).unsqueeze(-1)
            scores.scatter_add_(-1, local, -one)
            ctx.save_for_backward(scores, local, one)
            ctx.dtype = logits.dtype
        log_sum = total.log()
        return log_sum - target_score, log_sum + top.squeeze(-1)

    @staticmethod
    def backward(ctx, grad: Tensor, grad_log_z: Tensor | None):
        difference, local, one = ctx.saved_tensors
        if grad_log_z is None:
            return (difference * grad.unsqueeze(-1)).to(ctx.dtype), None, None, None
        slope = difference * (grad + grad_log_z).unsqueeze(-1)  # softmax = difference + onehot
        slope.scatter_add_(-1, local, one * grad_log_z.unsqueeze(-1))
        return slope.to(ctx.dtype), None, None, None


def cross_entropy(logits: Tensor, targets: Tensor, vocab: int, tp: Alone) -> Tensor:
    """Nats of each target, see ``nats_and_log_z``."""
    return nats_and_log_z(logits, targets, vocab, tp)[0]


def nats_and_log_z(logits: Tensor, targets: Tensor, vocab: int, tp: Alone) -> tuple[Tensor, Tensor]:
    """Nats of each target, and log Z = log sum exp of the scores.

    logits [..., v_padded / tp], targets [...] with ids below ``vocab`` -> [...], [...]. The padding columns
    (ids from ``vocab`` on) have no share in the softmax and no gradient.
    """
    return _CrossEntropy.apply(logits, targets, vocab, tp)
