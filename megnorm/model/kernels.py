"""Functions that compute a norm over the last axis, by kind and backend: one registry, the same values.

A kernel takes (x [..., n], gain, bias, norm); gain and bias are None, [n], or [h, n] for x [..., h, n].
Statistics are taken in fp32 (fp64 for fp64 input); the result has the dtype of x. Rounding: "gain_then_cast"
rounds a bf16 result once, "cast_then_gain" rounds the normed value before the gain as well.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megnorm.config.placement import Norm
from megnorm.model.kernels_rms import rms

Kernel = Callable[[Tensor, Tensor | None, Tensor | None, Norm], Tensor]


def rms_norm(x: Tensor, gain: Tensor | None, bias: Tensor | None, norm: Norm) -> Tensor:
    """gain * x / sqrt(mean(x^2) + eps) + bias (arXiv:1910.07467)."""
    width = x.shape[-1:]
    if norm.rounding == "cast_then_gain":
        return affine(rms(x, None, norm.eps), gain, bias, x.dtype)
    if bias is None and (gain is None or (gain.shape == width and gain.dtype == x.dtype)):
        return rms(x, gain, norm.eps)
    inside = gain if gain is not None and gain.shape == width else None
    wide = wide_dtype(x)
    y = rms(x.to(wide), inside.to(wide) if inside is not None else None, norm.eps)
    return affine(y, gain if inside is None else None, bias, x.dtype)


def layer_norm(x: Tensor, gain: Tensor | None, bias: Tensor | None, norm: Norm) -> Tensor:
    """gain * (x - mean) / sqrt(var + eps) + bias (arXiv:1607.06450)."""
    width = x.shape[-1:]
    if norm.rounding == "cast_then_gain":
        return affine(F.layer_norm(x, width, None, None, norm.eps), gain, bias, x.dtype)
    if all(p is None or (p.shape == width and p.dtype == x.dtype) for p in (gain, bias)):
        return F.layer_norm(x, width, gain, bias, norm.eps)
    return affine(F.layer_norm(x.to(wide_dtype(x)), width, None, None, norm.eps), gain, bias, x.dtype)


def affine(y: Tensor, gain: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """gain * y + bias in the widest dtype of the three, then cast."""
    if gain is not None:
        y = y * gain
    if bias is not None:
        y = y + bias
    return y.to(dtype)


def wide_dtype(x: Tensor) -> torch.dtype:
    """fp32 at least."""
    return torch.promote_types(x.dtype, torch.float32)


TORCH: dict[str, Kernel] = {"rms": rms_norm, "layer": layer_norm}


def kernel_for(kind: str, backend: str) -> tuple[str, Kernel]:
    """The backend that computes a kind of norm, and its function."""
    return "torch", TORCH[kind]
