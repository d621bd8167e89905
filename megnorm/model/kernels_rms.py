"""RMSNorm on a CPU with few passes over memory.

    r = 1 / sqrt(mean(x^2) + eps),  y = gain * x * r                        over the last axis, of n elements

    dx    = r * (gain * dy - x * r^2 * mean(gain * dy * x))
    dgain = sum over rows of dy * x * r

torch's own is a chain of elementwise operations there; on a GPU it is one kernel.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def rms(x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    """y in the dtype of x [..., n], computed in fp32 at least; gain [n] or None."""
    if x.device.type == "cpu":
        return _RMSNorm.apply(x, gain, eps)
    return F.rms_norm(x, x.shape[-1:], gain, eps)


class _RMSNorm(torch.autograd.Function):
    """Keeps x and r."""

    @staticmethod
    def forward(ctx, x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
        n = x.shape[-1]
        rows = x.reshape(-1, n)
        wide = rows.to(torch.promote_types(x.dtype, torch.float32))
        r = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(n).add_(eps).rsqrt_()
        ctx.save_for_backward(rows, gain, r)
        y = wide * r
        if gain is not None:
            y *= gain
        return y.to(x.dtype).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, gain, r = ctx.saved_tensors
        x, dy = rows.to(r.dtype), grad.reshape(rows.shape).to(r.dtype)
        g = x.new_ones(x.shape[-1]) if gain is None else gain.to(r.dtype)
        product = dy * x
        dgain = None if gain is None else torch.mv(product.T, r.squeeze(-1)).to(gain.dtype)
        mean = torch.mv(product, g).div_(x.shape[-1]).unsqueeze(-1)
        dx = torch.mul(dy, g, out=product).addcmul_(x, mean * r.square(), value=-1).mul_(r)
        return dx.to(rows.dtype).view(grad.shape), dgain, None
