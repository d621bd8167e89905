"""How a parameter is sharded is metadata on the parameter.

From this one value follow its initial bits, the sum of its gradient over tensor-parallel ranks, its share of
the gradient norm, its weight-decay group, its place in a checkpoint. No rule looks at a parameter's name.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

Role = Literal["matrix", "embedding", "norm", "bias", "state"]


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
class ExpertSlice:
    """Of a parameter whose dimension 0 counts experts: it is cut into ``count`` equal slices over the
    expert-parallel ranks, of which this rank holds number ``index``."""

    index: int = 0
    count: int = 1


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
    experts: which experts this rank holds, of a parameter whose dimension 0 counts them; beside ``dim``.
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
    experts: ExpertSlice | None = None

    @property
    def cuts(self) -> dict[int, tuple[int, int]]:
        """Which slice of how many this rank holds, by dimension that is cut."""
        cuts = {} if self.dim is None else {self.dim: (self.index, self.count)}
        return cuts if self.experts is None else {**cuts, 0: (self.experts.index, self.experts.count)}

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's part."""
        return tuple(n // self.cuts.get(d, (0, 1))[1] for d, n in enumerate(self.shape))

    def slices(self) -> tuple[slice, ...]:
        """Where this rank's part stands in the whole tensor."""
        first = [self.cuts.get(d, (0, 1))[0] * n for d, n in enumerate(self.local_shape)]
        return tuple(slice(start, start + n) for start, n in zip(first, self.local_shape, strict=True))

    def by_expert(self) -> "list[Sharding]":
        """One for each expert that this rank holds, under the name NAME.NUMBER; of other parameters itself."""
        if self.experts is None:
            return [self]
        return [replace(self, name=f"{self.name}.{number}", shape=self.shape[1:], experts=None,
                        dim=None if self.dim is None else self.dim - 1)
                for number in range(self.slices()[0].start, self.slices()[0].stop)]

    def cut(self, value: Tensor) -> list[Tensor]:
        """This rank's part of a tensor in the pieces of ``by_expert``."""
        return [value] if self.experts is None else list(value.unbind(0))

    def join(self, pieces: list[Tensor]) -> Tensor:
        """The inverse of ``cut``."""
        return pieces[0] if self.experts is None else torch.stack(pieces)


def new_parameter(sharding: Sharding) -> nn.Parameter:
    """An unfilled fp32 parameter of this rank's shape that carries its metadata."""
    assert sharding.experts is None or sharding.dim != 0, sharding
    for dim, (_, count) in sharding.cuts.items():
        assert sharding.shape[dim] % count == 0, sharding
    parameter = nn.Parameter(torch.empty(sharding.local_shape))
    parameter.sharding = sharding
    return parameter


def sharding_of(parameter: nn.Parameter) -> Sharding:
    """The metadata of a parameter; a parameter without is a programmer's error."""
    sharding = getattr(parameter, "sharding", None)
    assert sharding is not None, f"a parameter of shape {tuple(parameter.shape)} carries no sharding"
    return sharding


def keep_state(module: nn.Module, attribute: str, name: str, value: Tensor) -> None:
    """Give a module a buffer that is part of the training state although no optimizer moves it: fp32, the same
    on all ranks that hold the module; checkpoints know it by its global ``name``."""
    module.register_buffer(attribute, value)
    module.kept_states = {**getattr(module, "kept_states", {}), attribute: name}


def kept_states(module: nn.Module) -> dict[str, Tensor]:
    """What ``keep_state`` gave the module and those in it, by global name."""
    return {name: getattr(part, attribute) for part in module.modules()
            for attribute, name in getattr(part, "kept_states", {}).items()}
