"""How a parameter is sharded is metadata on the parameter.

From this one value follow its initial bits, the sum of its gradient over tensor-parallel ranks, its share of
the gradient norm, its weight-decay group, its place in a checkpoint. No rule looks at a parameter's name.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

Role = Literal["matrix", "embedding", "norm", "bias"]


@dataclass(frozen=True)
class Normal:
    """Initial values N(0, std^2), redrawn beyond ``cut`` standard deviations."""

    std: float
    cut: float


@dataclass(frozen=True)
class Constant:
    """One initial value everywhere: norm gains, biases."""

    value: float


@dataclass(frozen=True)
class Sharding:
    """What a parameter is in the whole model, and which part of it this rank holds.

    name: global name, with global layer numbers.
    shape: shape of the whole tensor.
    dim: dimension that is cut into ``count`` equal slices over the tensor-parallel ranks, of which this rank
        holds number ``index``; None: every rank holds the whole tensor. With fewer slices than ranks,
        neighbouring ranks hold copies of one slice.
    first: whether this rank is the first of those that hold this part: it alone counts and saves it.
    partial: each copy's gradient is only a share (the parameter acts on this rank's heads or tokens): the sum
        over the copies belongs to the parameter's use, see ``TensorParallel.shared``.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    init: Normal | Constant
    dim: int | None = None
    index: int = 0
    count: int = 1
    first: bool = True
    partial: bool = False

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's part."""
        return tuple(n // self.count if d == self.dim else n for d, n in enumerate(self.shape))

    def slices(self) -> tuple[slice, ...]:
        """Where this rank's part stands in the whole tensor."""
        local = self.local_shape
        return tuple(slice(self.index * n, (self.index + 1) * n) if d == self.dim else slice(0, n)
                     for d, n in enumerate(local))


def new_parameter(sharding: Sharding) -> nn.Parameter:
    """An unfilled fp32 parameter of this rank's shape that carries its metadata."""
    if sharding.dim is not None:
        assert sharding.shape[sharding.dim] % sharding.count == 0, sharding
    parameter = nn.Parameter(torch.empty(sharding.local_shape))
    parameter.sharding = sharding
    return parameter


def sharding_of(parameter: nn.Parameter) -> Sharding:
    """The metadata of a parameter; a parameter without is a programmer's error."""
    sharding = getattr(parameter, "sharding", None)
    assert sharding is not None, f"a parameter of shape {tuple(parameter.shape)} carries no sharding"
    return sharding
