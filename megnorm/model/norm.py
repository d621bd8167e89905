"""Norm modules. An absent norm is the identity, chosen when the model is built.

The kinds and their equations: megnorm.config.placement.Norm. Learned are gain, bias and DyT's alpha.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from megnorm.config.base import ConfigError
from megnorm.config.placement import HeadNorm, Norm
from megnorm.model.kernels import affine, kernel_for, wide_dtype
from megnorm.parallel.sharding import Constant
from megnorm.parallel.tensor import Alone

Make = Callable[..., nn.Parameter]


class Learned(nn.Module):
    """Gain and bias of a norm, None where absent; a zero-centred gain is stored less 1.

    make: creates a parameter, sharded like the axis on which it acts. factor: constant on the gain.
    """

    def __init__(self, name: str, norm: Norm, shape: tuple[int, ...], make: Make, tp: Alone,
                 factor: float = 1.0):
        super().__init__()
        self.tp, self.norm, self.factor = tp, norm, factor * norm.scale
        self.offset = 1.0 if norm.zero_centred else 0.0
        self.gain = (make(f"{name}.gain", shape, role="norm", init=Constant(norm.gain_init - self.offset))
                     if norm.gain != "none" else None)
        self.bias = make(f"{name}.bias", shape, role="bias", init=Constant(0.0)) if norm.bias else None
        self.as_stored = self.factor == norm.scale == 1.0 and not norm.zero_centred

    def vectors(self, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Gain and bias as they act on x; in fp32 at least where they differ from what is stored."""
        gain, bias = self.tp.shared(self.gain), self.tp.shared(self.bias)
        if self.as_stored:
            return gain, bias
        wide = wide_dtype(x)
        gain = x.new_ones(x.shape[-1], dtype=wide) if gain is None else gain.to(wide) + self.offset
        return self.factor * gain, None if bias is None else self.norm.scale * bias.to(wide)


class LocalNorm(Learned):
    """A norm whose statistic lies within one rank: over the last axis of x, cut into groups of ``width``."""

    def __init__(self, name: str, norm: Norm, width: int, *, tp: Alone, make: Make | None = None,
                 shape: tuple[int, ...] | None = None, backend: str = "auto"):
        """make: default, on the hidden stream. shape of gain and bias: [width], or [groups, width]."""
        factor, kind = 1.0, norm.kind
        if norm.kind == "l2":  # x / sqrt(sum(x^2) + eps) = x / sqrt(mean(x^2) + eps / n) / sqrt(n)
            norm, factor = norm.model_copy(update={"kind": "rms", "eps": norm.eps / width}), width**-0.5
        super().__init__(name, norm, shape or (width,), make or tp.on_stream, tp, factor)
        self.kind, self.width = kind, width
        self.backend, self.kernel = kernel_for(norm.kind, backend)

    def forward(self, x: Tensor) -> Tensor:
        groups = x.unflatten(-1, (-1, self.width)) if x.shape[-1] != self.width else x
        y = self.kernel(groups, *self.vectors(groups), self.norm)
        return y.reshape(x.shape)


class SpanningNorm(Learned):
    """A norm over an axis that is split over tensor-parallel ranks: x [..., width / tp].

    The sums that the statistic needs are added over the ranks, and so are their gradients; gain and bias
    are sharded like x.
    """

    def __init__(self, name: str, norm: Norm, width: int, *, tp: Alone, slices: int | None = None):
        """slices: pieces that x can be cut into; with fewer than ranks, each piece is counted once."""
        slices = min(slices or tp.size, tp.size)
        super().__init__(name, norm, (width,), partial(tp.parameter, dim=0, slices=slices), tp)
        self.backend, self.copies = "torch", tp.size // slices
        self.kind, self.width = norm.kind, width

    def forward(self, x: Tensor) -> Tensor:
        return affine(normed(x, self.norm, self.width, self._sum), *self.vectors(x), x.dtype)

    def _sum(self, x: Tensor) -> Tensor:
        """Over the whole axis [..., 1]."""
        return self.tp.statistic(x.sum(-1, keepdim=True)) / self.copies


def normed(x: Tensor, norm: Norm, width: int, total: Callable[[Tensor], Tensor]) -> Tensor:
    """x without gain and bias; total: the sum over an axis of ``width``, of which x [..., width / tp] is a part."""
    wide = x.to(wide_dtype(x))
    if norm.kind == "layer":
        wide = wide - total(wide) / width
    count = 1 if norm.kind == "l2" else width
    y = wide * torch.rsqrt(total(wide.square()) / count + norm.eps)
    return y.to(x.dtype) if norm.rounding == "cast_then_gain" else y


class DyT(Learned):
    """gain * tanh(alpha x) + bias (arXiv:2503.10622): no statistic, hence none to sum over ranks."""

    def __init__(self, name: str, norm: Norm, width: int, *, tp: Alone, make: Make | None = None,
                 shape: tuple[int, ...] | None = None, make_alpha: Make | None = None):
        """The gain is [groups, width] or [width] on x [..., groups * width]; alpha is a scalar [1]."""
        super().__init__(name, norm, shape or (width,), make or tp.on_stream, tp)
        self.backend, self.kind, self.width = "torch", norm.kind, width
        make_alpha = make_alpha or tp.on_stream
        self.alpha = make_alpha(f"{name}.alpha", (1,), role="norm", init=Constant(norm.alpha_init))

    def forward(self, x: Tensor) -> Tensor:
        wide = wide_dtype(x)
        y = torch.tanh(self.tp.shared(self.alpha).to(wide) * x.to(wide))
        y = y.to(x.dtype) if self.norm.rounding == "cast_then_gain" else y
        groups = y.unflatten(-1, (-1, self.width)) if x.shape[-1] != self.width else y
        return affine(groups, *self.vectors(groups), x.dtype).reshape(x.shape)


class ExpertsNorm(Learned):
    """A norm over the inner axis of experts: rows [m, f / tp] sorted by expert, and the number of rows of each [n];
    every expert has a gain, a bias and a DyT's alpha of its own."""

    def __init__(self, name: str, norm: Norm, experts: int, width: int, *, tp: Alone, make: Make):
        super().__init__(name, norm, (experts, width), partial(make, dim=1), tp)
        self.backend, self.kind, self.width = "torch", norm.kind, width
        self.alpha = (make(f"{name}.alpha", (experts, 1), partial=True, role="norm", init=Constant(norm.alpha_init))
                      if norm.kind == "dyt" else None)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        def by_row(vectors: Tensor | None) -> Tensor | None:
            return None if vectors is None else vectors.expand(len(counts), -1).repeat_interleave(counts, 0)

        if self.alpha is not None:
            y = torch.tanh(by_row(self.tp.shared(self.alpha)) * x.to(wide_dtype(x)))
            y = y.to(x.dtype) if self.norm.rounding == "cast_then_gain" else y
        else:
            y = normed(x, self.norm, self.width, lambda z: self.tp.statistic(z.sum(-1, keepdim=True)))
        return affine(y, *map(by_row, self.vectors(x)), x.dtype)


class Unnormed(nn.Module):
    """No norm of the experts' inner axis."""

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        return x


def hidden_norm(name: str, norm: Norm | None, width: int, tp: Alone, backend: str = "auto") -> nn.Module:
    """A norm over the hidden axis, which every rank holds whole (of all tokens, or of its slice of them)."""
    if norm is None:
        return nn.Identity()
    if norm.kind == "dyt":
        return DyT(name, norm, width, tp=tp)
    return LocalNorm(name, norm, width, tp=tp, backend=backend)


def heads_norm(name: str, norm: HeadNorm | None, heads: int, head_size: int, tp: Alone,
               backend: str = "auto") -> nn.Module:
    """A norm of this rank's heads, laid out flat [..., heads / tp * head_size].

    Over one head, the shared gain acts on this rank's heads only: its gradient is a share, hence ``partial``;
    a gain per head is sharded by head.
    """
    if norm is None:
        return nn.Identity()
    if norm.scope == "all_heads":
        return _sharded_norm(name, norm, heads * head_size, tp, heads, backend)
    if norm.gain == "per_head":
        about = {"make": _sliced(tp, heads), "shape": (heads, head_size)}
    else:
        about = {"make": partial(tp.parameter, partial=True)}
    if norm.kind == "dyt":
        return DyT(name, norm, head_size, tp=tp, make_alpha=partial(tp.parameter, partial=True), **about)
    return LocalNorm(name, norm, head_size, tp=tp, backend=backend, **about)


def inner_norm(name: str, norm: Norm | None, width: int, tp: Alone, backend: str = "auto") -> nn.Module:
    """A norm over the FFN's inner axis, which is split over the ranks."""
    return nn.Identity() if norm is None else _sharded_norm(name, norm, width, tp, tp.size, backend)


def experts_norm(name: str, norm: Norm | None, experts: int, width: int, tp: Alone, make: Make) -> nn.Module:
    """A norm over each expert's inner axis, which is split over the ranks. make: creates a parameter of experts."""
    return Unnormed() if norm is None else ExpertsNorm(name, norm, experts, width, tp=tp, make=make)


def _sharded_norm(name: str, norm: Norm, width: int, tp: Alone, slices: int, backend: str) -> nn.Module:
    """A norm over an axis that is cut into ``slices`` pieces at most; one rank alone needs no sums."""
    make = _sliced(tp, slices)
    if norm.kind == "dyt":
        own, make_alpha = width // min(slices, tp.size), partial(tp.parameter, partial=True)
        return DyT(name, norm, own, tp=tp, make=make, shape=(width,), make_alpha=make_alpha)
    if tp.size == 1:
        return LocalNorm(name, norm, width, tp=tp, make=make, backend=backend)
    return SpanningNorm(name, norm, width, tp=tp, slices=slices)


def _sliced(tp: Alone, slices: int) -> Make:
    """Makes parameters that are cut along their first dimension."""
    return partial(tp.parameter, dim=0, slices=min(slices, tp.size))


def kernels_used(module: nn.Module) -> list[str]:
    """One line for each kind and width of norm on this rank: how many there are, and what computes them."""
    counts: dict[str, int] = {}
    for norm in module.modules():
        if isinstance(norm, Learned):
            where = ", statistic over tensor-parallel ranks" if isinstance(norm, SpanningNorm) else ""
            line = f"{norm.kind} over {norm.width}: {norm.backend}{where}"
            counts[line] = counts.get(line, 0) + 1
    return [f"{count} x {line}" for line, count in sorted(counts.items())]


def check_device(backend: str, device: torch.device) -> None:
    """Raise ConfigError where the backend has no kernels for this device."""
    if backend == "apex" and device.type != "cuda":
        raise ConfigError(f"model.norm.backend=apex computes on CUDA devices only, and this run is on {device.type}; "
                          "take auto, torch or compile")
