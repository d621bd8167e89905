"""Functions that compute a norm over the last axis, by kind and backend: one registry, the same values.

A kernel takes (x [..., n], gain, bias, norm); gain and bias are None, [n], or [h, n] for x [..., h, n].
Statistics are taken in fp32 (fp64 for fp64 input); the result has the dtype of x. Rounding: "gain_then_cast"
rounds a bf16 result once, "cast_then_gain" rounds the normed value before the gain as well. A backend is a pair
of functions that know nothing of all this: rms(x, gain, eps), layer(x, gain, bias, eps), where gain and bias are
None or [n] in the dtype of x.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megnorm.config.base import ConfigError
from megnorm.config.placement import Norm
from megnorm.model.kernels_rms import rms as few_passes

Kernel = Callable[[Tensor, Tensor | None, Tensor | None, Norm], Tensor]


class Backend(NamedTuple):
    """Name, as the run prints it, and the two functions."""

    name: str
    rms: Callable[[Tensor, Tensor | None, float], Tensor]
    layer: Callable[[Tensor, Tensor | None, Tensor | None, float], Tensor]


def torch_rms(x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    """torch's own."""
    return F.rms_norm(x, x.shape[-1:], gain, eps)


def torch_layer(x: Tensor, gain: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """torch's own."""
    return F.layer_norm(x, x.shape[-1:], gain, bias, eps)


def rms_norm(x: Tensor, gain: Tensor | None, bias: Tensor | None, norm: Norm, rms: Callable = few_passes) -> Tensor:
    """gain * x / sqrt(mean(x^2) + eps) + bias (arXiv:1910.07467)."""
    if norm.rounding == "cast_then_gain":
        return affine(rms(x, None, norm.eps), gain, bias, x.dtype)
    if bias is None and _fits(gain, x):
        return rms(x, gain, norm.eps)
    wide = wide_dtype(x)
    inside = gain.to(wide) if gain is not None and gain.shape == x.shape[-1:] else None
    y = rms(x.to(wide), inside, norm.eps)
    return affine(y, gain if inside is None else None, bias, x.dtype)


def layer_norm(x: Tensor, gain: Tensor | None, bias: Tensor | None, norm: Norm,
               layer: Callable = torch_layer) -> Tensor:
    """gain * (x - mean) / sqrt(var + eps) + bias (arXiv:1607.06450)."""
    if norm.rounding == "cast_then_gain":
        return affine(layer(x, None, None, norm.eps), gain, bias, x.dtype)
    if _fits(gain, x) and _fits(bias, x):
        return layer(x, gain, bias, norm.eps)
    return affine(layer(x.to(wide_dtype(x)), None, None, norm.eps), gain, bias, x.dtype)


def _fits(vector: Tensor | None, x: Tensor) -> bool:
    """Whether a backend takes this gain or bias as it is."""
    return vector is None or (vector.shape == x.shape[-1:] and vector.dtype == x.dtype)


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


@cache
def compiled() -> Backend:
    """Plain tensor code that torch.compile fuses."""
    if torch._dynamo.config.disable:
        raise ConfigError("model.norm.backend=compile, but TORCHDYNAMO_DISABLE=1 switches torch.compile off; unset it, "
                          "or take auto")

    def rms(x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
        wide = x.to(wide_dtype(x))
        return affine(wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps), gain, None, x.dtype)

    def layer(x: Tensor, gain: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        wide = x.to(wide_dtype(x))
        wide = wide - wide.mean(-1, keepdim=True)
        return affine(wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps), gain, bias, x.dtype)

    return Backend("compile", torch.compile(rms, dynamic=True), torch.compile(layer, dynamic=True))


@cache
def apex() -> Backend:
    """NVIDIA's apex, general kernels, which take every width; megnorm.norms.backends has seen that it is there."""
    from apex.normalization import fused_layer_norm as its

    if not hasattr(its, "fused_rms_norm_affine"):
        raise ConfigError("model.norm.backend=apex: this apex has no FusedRMSNorm; build a newer one, or take auto")

    def rms(x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
        width = x.shape[-1:]
        return its.fused_rms_norm(x, width, eps) if gain is None else its.fused_rms_norm_affine(x, gain, width, eps)

    def layer(x: Tensor, gain: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        width = x.shape[-1:]
        if gain is None and bias is None:
            return its.fused_layer_norm(x, width, eps)
        gain, bias = (x.new_ones(width) if gain is None else gain), (x.new_zeros(width) if bias is None else bias)
        return its.fused_layer_norm_affine(x, gain, bias, width, eps)

    return Backend("apex", rms, layer)


BACKENDS: dict[str, Callable[[], Backend]] = {
    "auto": lambda: Backend("auto", few_passes, torch_layer),
    "torch": lambda: Backend("torch", torch_rms, torch_layer),
    "compile": compiled,
    "apex": apex,
}


def kernel_for(kind: str, backend: str) -> tuple[str, Kernel]:
    """The name of the backend that computes a kind of norm, and the kernel."""
    chosen = BACKENDS[backend]()
    kernels = {"rms": partial(rms_norm, rms=chosen.rms), "layer": partial(layer_norm, layer=chosen.layer)}
    return chosen.name, kernels[kind]
