"""What the modules of one model on one rank have in common."""

from dataclasses import dataclass

from megnorm.config import ModelConfig
from megnorm.model.core import Core
from megnorm.model.rotary import NoPositions, Rotary
from megnorm.model.routing import Routing
from megnorm.model.scale import StepClock
from megnorm.parallel.context import WholeContext
from megnorm.parallel.expert import AllExperts
from megnorm.parallel.tensor import Alone
from megnorm.parallel.tokens import SequenceParts


@dataclass(frozen=True)
class Common:
    """Sizes, tensor-, context- and expert-parallel ranks, how positions turn heads, attention core, training step, what
    routers did."""

    model: ModelConfig
    tp: Alone
    cp: WholeContext
    turn: Rotary | NoPositions
    core: Core
    clock: StepClock
    ep: AllExperts
    routing: Routing

    @property
    def parts(self) -> SequenceParts:
        """The ranks over which sequences are cut."""
        return SequenceParts(self.tp, self.cp)
