"""The loss of a batch, and what it records beside its value."""

import torch
from torch import Tensor

from megnorm.parallel.cross_entropy import nats_and_log_z
from megnorm.parallel.tensor import Alone


class Meter:
    """Sums, by name, of parts of the loss that are trained but not reported as loss; the engine takes them
    after each step."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor) -> None:
        """Add a detached scalar."""
        value = value.detach().double()
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def take(self) -> dict[str, Tensor]:
        """The sums since the last time."""
        sums, self._sums = self._sums, {}
        return sums


class TokenLoss:
    """Weighted sum of the tokens' cross entropies; the weights already hold the mean's denominator.

    z_loss: weight of (log Z)^2 of the same tokens (arXiv:2204.02311). It has its gradient, but no part in the
    value: ``meter`` records it as "z_loss".
    """

    def __init__(self, vocab: int, tp: Alone, z_loss: float = 0.0):
        self.vocab, self.tp, self.z_loss, self.meter = vocab, tp, z_loss, Meter()

    @property
    def parts(self) -> tuple[str, ...]:
        """Names that the meter will hold."""
        return ("z_loss",) if self.z_loss else ()

    def __call__(self, logits: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
        """logits [b, s, v / tp], labels = (targets [b, s], weights [b, s]) -> scalar."""
        targets, weights = labels
        nats, log_z = nats_and_log_z(logits, targets, self.vocab, self.tp)
        loss = (nats * weights).sum()
        if self.z_loss and torch.is_grad_enabled():
            z_loss = self.z_loss * (log_z.square() * weights).sum()
            self.meter.add("z_loss", z_loss)
            loss = loss + (z_loss - z_loss.detach())
        return loss
