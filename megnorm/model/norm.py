"""Norm modules. An absent norm is the identity, chosen when the model is built.

RMSNorm: arXiv:1910.07467. LayerNorm: arXiv:1607.06450. Statistics are taken in fp32 (fp64 for fp64 input).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megnorm.config.placement import HeadNorm, Norm
from megnorm.parallel.sharding import Constant
from megnorm.parallel.tensor import Alone


def rms_norm(x: Tensor, gain: Tensor, bias: Tensor | None, norm: Norm) -> Tensor:
    """gain * x / sqrt(mean(x^2) + eps) + bias over the last axis; x [..., n], gain and bias [n]."""
    if norm.rounding == "cast_then_gain":
        y = F.rms_norm(x, x.shape[-1:], None, norm.eps) * gain
        return y if bias is None else y + bias
    if bias is None:
        return F.rms_norm(x, x.shape[-1:], gain, norm.eps)
    wide = torch.promote_types(x.dtype, torch.float32)
    return (F.rms_norm(x.to(wide), x.shape[-1:], gain.to(wide), norm.eps) + bias.to(wide)).to(x.dtype)


def layer_norm(x: Tensor, gain: Tensor, bias: Tensor | None, norm: Norm) -> Tensor:
    """gain * (x - mean) / sqrt(var + eps) + bias over the last axis; x [..., n], gain and bias [n]."""
    if norm.rounding == "cast_then_gain":
        y = F.layer_norm(x, x.shape[-1:], None, None, norm.eps) * gain
        return y if bias is None else y + bias
    return F.layer_norm(x, x.shape[-1:], gain, bias, norm.eps)


KERNELS = {"rms": rms_norm, "layer": layer_norm}


class LocalNorm(nn.Module):
    """A norm whose statistic lies within one rank: over the last axis of x, cut into groups of ``width``."""

    def __init__(self, name: str, norm: Norm, width: int, *, tp: Alone, partial: bool = False):
        super().__init__()
        self.tp, self.norm, self.width, self.kernel = tp, norm, width, KERNELS[norm.kind]
        about = {"role": "norm", "partial": partial}
        self.gain = tp.parameter(f"{name}.gain", (width,), init=Constant(norm.gain_init), **about)
        self.bias = (tp.parameter(f"{name}.bias", (width,), init=Constant(0.0), role="bias", partial=partial)
                     if norm.bias else None)

    def forward(self, x: Tensor) -> Tensor:
        groups = x.unflatten(-1, (-1, self.width)) if x.shape[-1] != self.width else x
        y = self.kernel(groups, self.tp.shared(self.gain), self.tp.shared(self.bias), self.norm)
        return y.view(x.shape)


class SpanningNorm(nn.Module):
    """A norm over an axis that is split over tensor-parallel ranks: x [..., width / tp].

    The sums that the statistic needs are added over the ranks, and so are their gradients; gain and bias
    are sharded like x.
    """

    def __init__(self, name: str, norm: Norm, width: int, *, tp: Alone, slices: int | None = None):
        """slices: pieces that x can be cut into; with fewer than ranks, each piece is counted once."""
        super().__init__()
        self.tp, self.norm = tp, norm
        cut = {"dim": 0, "slices": min(slices or tp.size, tp.size)}
        self.counted = width * tp.size // cut["slices"]
        self.gain = tp.parameter(f"{name}.gain", (width,), role="norm", init=Constant(norm.gain_init), **cut)
        self.bias = (tp.parameter(f"{name}.bias", (width,), role="bias", init=Constant(0.0), **cut)
                     if norm.bias else None)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.norm.kind == "layer":
            wide = wide - self.tp.statistic(wide.sum(-1, keepdim=True)) / self.counted
        mean_square = self.tp.statistic(wide.square().sum(-1, keepdim=True)) / self.counted
        y = wide * torch.rsqrt(mean_square + self.norm.eps)
        if self.norm.rounding == "cast_then_gain":
            y = y.to(x.dtype) * self.tp.shared(self.gain)
        else:
            y = y * self.tp.shared(self.gain)
        if self.bias is not None:
            y = y + self.tp.shared(self.bias)
        return y.to(x.dtype)


def hidden_norm(name: str, norm: Norm | None, width: int, tp: Alone) -> nn.Module:
    """A norm over the hidden axis, which every rank holds whole (of all tokens, or of its slice of them)."""
    return nn.Identity() if norm is None else LocalNorm(name, norm, width, tp=tp, partial=tp.sliced)


def heads_norm(name: str, norm: HeadNorm | None, heads: int, head_size: int, tp: Alone) -> nn.Module:
    """A norm of this rank's heads, laid out flat [..., heads / tp * head_size].

    Over one head, the shared gain acts on this rank's heads only: its gradient is a share, hence ``partial``.
    """
    if norm is None:
        return nn.Identity()
    if norm.scope == "all_heads":
        return SpanningNorm(name, norm, heads * head_size, tp=tp, slices=heads)
    return LocalNorm(name, norm, head_size, tp=tp, partial=True)


def inner_norm(name: str, norm: Norm | None, width: int, tp: Alone) -> nn.Module:
    """A norm over the FFN's inner axis, which is split over the ranks."""
    return nn.Identity() if norm is None else SpanningNorm(name, norm, width, tp=tp)
