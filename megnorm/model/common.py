"""What the modules of one model on one rank have in common."""

from dataclasses import dataclass

from megnorm.config import ModelConfig
from megnorm.model.core import Core
from megnorm.model.rotary import Rotary
from megnorm.model.scale import StepClock
from megnorm.parallel.context import WholeContext
from megnorm.parallel.tensor import Alone


@dataclass(frozen=True)
class Common:
    """Sizes, tensor- and context-parallel ranks, rotary positions, attention core, training step."""

    model: ModelConfig
    tp: Alone
    cp: WholeContext
    rotary: Rotary
    core: Core
    clock: StepClock
