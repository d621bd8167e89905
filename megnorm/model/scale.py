"""Factors of the sublayer equation: constant, learned, growing with the training step."""

import math
from dataclasses import dataclass

from torch import Tensor, nn

from megnorm.config.placement import Scale
from megnorm.parallel.sharding import Constant
from megnorm.parallel.tensor import Alone


@dataclass
class StepClock:
    """The training step that a model is in, from 1; 0 before the first; infinite: as after the last.

    Made once per model and handed to the modules that depend on it. Whoever runs the model sets it: the
    engine before a step and before an evaluation (which happens in the step just done), so that pipeline
    stages, recomputed blocks, evaluations and resumed runs all see the same number.
    """

    step: float = math.inf

    def ramp(self, steps: int) -> float:
        """min(step / steps, 1): from 0 to 1 over the first ``steps`` steps."""
        return min(self.step / steps, 1.0)


class ConstantScale(nn.Module):
    """Multiplication by a constant."""

    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


class LearnedScale(nn.Module):
    """Multiplication of the stream [b, s, d] by a learned scalar [1] or vector [d]."""

    def __init__(self, name: str, slot: Scale, width: int, tp: Alone):
        super().__init__()
        self.tp, self.profiled = tp, slot.profiled
        shape = (width,) if slot.learned == "vector" else (1,)
        self.factor = tp.on_stream(f"{name}.factor", shape, role="norm", init=Constant(slot.value))

    def forward(self, x: Tensor) -> Tensor:
        return self.tp.shared(self.factor) * x


class Ramp(nn.Module):
    """Another factor times min(t / steps, 1) in training step t (ProRes, arXiv:2603.05369)."""

    def __init__(self, factor: nn.Module, steps: int, clock: StepClock):
        super().__init__()
        self.factor, self.steps, self.clock = factor, steps, clock

    def forward(self, x: Tensor) -> Tensor:
        return self.clock.ramp(self.steps) * self.factor(x)


def make_scale(name: str, slot: Scale, width: int, tp: Alone, clock: StepClock) -> nn.Module:
    """The factor that the slot describes; a constant 1 is the identity."""
    if slot.learned != "no":
        factor = LearnedScale(name, slot, width, tp)
    else:
        factor = nn.Identity() if slot.value == 1.0 else ConstantScale(slot.value)
    return Ramp(factor, slot.ramp_steps, clock) if slot.ramp_steps else factor
