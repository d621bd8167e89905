"""What the routers of a model did in a training step; n experts."""

from collections.abc import Callable
from statistics import fmean
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megnorm.config import ModelConfig


class Seen(NamedTuple):
    """Of a micro batch, this rank's share of sums over its tokens, less padding: choices of each expert [n] before any
    is dropped, choices dropped, entropy of the scores; and of the losses without their weights. Scalars but the
    first."""

    choices: Tensor
    dropped: Tensor
    entropy: Tensor
    aux: Tensor
    z: Tensor


class LayerRouting(NamedTuple):
    """One layer's routing of a global batch. load: share of each expert in the choices. dropped: share of the choices.
    entropy: of a token's scores, in nats, mean over tokens. aux, z: the losses without their weights, means over
    micro batches, see megnorm.model.router."""

    load: list[float]
    dropped: float
    entropy: float
    aux: float
    z: float


class Balanced(Protocol):
    """A router, as far as it must be told how the step went."""

    def rebalance(self, load: Tensor) -> None:
        """load [n]: share of each expert in the choices of the global batch."""


class Routing:
    """Made once for a model and handed to its routers, which add what they saw in their backward passes: every
    micro batch makes one, recomputed or not, and an evaluation none.

    loss_scale: the gradient of a micro batch's loss, set by whoever runs the model: one over the micro batches of
    this rank, times the context-parallel ranks, over which gradients are averaged and the loss is cut.
    """

    def __init__(self, model: ModelConfig):
        self.layers, self.moe, self.loss_scale = model.moe_layers, model.moe, 1.0
        self.routers: dict[int, Balanced] = {}
        self._sums: dict[int, Tensor] = {}

    def add(self, layer: int, seen: Seen) -> None:
        """A micro batch of the layer with this global number."""
        flat = torch.cat([value.detach().double().reshape(-1) for value in seen])
        self._sums[layer] = self._sums[layer] + flat if layer in self._sums else flat

    def end_step(self, total: Callable[[Tensor], Tensor], micro_batches: int) -> dict[int, LayerRouting]:
        """Each layer's routing in a step of so many micro batches over all ranks; moves the balancing biases.

        total: sums over ranks, see megnorm.parallel.tokens.sum_over_tokens. A collective call where it is one.
        """
        if not self.layers:
            return {}
        sums, self._sums = self._sums, {}
        n = self.moe.experts
        nothing = torch.zeros(n + len(Seen._fields) - 1, dtype=torch.float64)
        device = next((row.device for row in sums.values()), "cpu")
        whole = total(torch.stack([sums.get(layer, nothing).to(device) for layer in self.layers])).cpu()
        found = {}
        for layer, row in zip(self.layers, whole, strict=True):
            choices, (dropped, entropy, aux, z) = row[:n], row[n:].tolist()
            made = float(choices.sum())
            load = choices / made
            if layer in self.routers:
                self.routers[layer].rebalance(load)
            found[layer] = LayerRouting(load.tolist(), dropped / made, entropy * self.moe.top_k / made,
                                        aux / micro_batches, z / micro_batches)
        return found

    def beside(self, found: dict[int, LayerRouting]) -> dict[str, float]:
        """The losses that are trained but not reported as loss, with their weights, means over layers."""
        if not self.layers:
            return {}
        weights = {"router_aux_loss": (self.moe.aux_weight, [layer.aux for layer in found.values()]),
                   "router_z_loss": (self.moe.z_weight, [layer.z for layer in found.values()])}
        return {name: weight * fmean(values) for name, (weight, values) in weights.items() if weight}
