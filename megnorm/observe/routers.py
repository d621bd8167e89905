"""What is watched of the routers of layers with experts; all numbers are those of the whole global batch."""

import math
from collections.abc import Mapping
from typing import Protocol


class LayerRouting(Protocol):
    """One layer in one step, see megnorm.model.routing."""

    load: list[float]
    dropped: float
    entropy: float
    z: float


class RouterWatch:
    """Rows about the first step and each whose number ``every`` divides (0: none), and warnings of experts to which
    no token went for ``idle_steps`` steps in a row (0: none)."""

    def __init__(self, every: int, idle_steps: int):
        self.every, self.idle_steps = every, idle_steps
        self.idle: dict[tuple[int, int], int] = {}

    def row(self, step: int, routing: Mapping[int, LayerRouting]) -> dict[str, dict]:
        """By layer: load, the share of each expert in the choices; max_over_mean of it; dropped, a share of the
        choices; entropy of a token's scores in nats; z, the mean of logsumexp(logits)^2. Empty where none is due; a
        number that is not finite is None."""
        if not self.every or (step > 1 and step % self.every):
            return {}
        return {layer_name(layer): {"load": [_number(share) for share in seen.load],
                                    "max_over_mean": _number(max(seen.load) * len(seen.load)),
                                    "dropped": _number(seen.dropped), "entropy": _number(seen.entropy),
                                    "z": _number(seen.z)} for layer, seen in routing.items()}

    def warnings(self, step: int, routing: Mapping[int, LayerRouting]) -> list[str]:
        """A line on each layer where experts are idle for so long since this step."""
        lines = []
        for layer, seen in routing.items():
            for expert, share in enumerate(seen.load):
                self.idle[layer, expert] = 0 if share else self.idle.get((layer, expert), 0) + 1
            late = [expert for expert in range(len(seen.load)) if self.idle[layer, expert] == self.idle_steps > 0]
            if late:
                lines.append(f"step {step}: no token went to expert{'s' if late[1:] else ''} "
                             f"{', '.join(map(str, late))} of {layer_name(layer)} for {self.idle_steps} steps")
        return lines


def broken_router(routing: Mapping[int, LayerRouting]) -> str | None:
    """The first layer whose router gave scores that are not numbers."""
    return next((layer_name(layer) for layer, seen in sorted(routing.items()) if not math.isfinite(seen.z)), None)


def layer_name(layer: int) -> str:
    """The name of a block in metrics, by its global number from 0."""
    return f"layers.{layer}"


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
