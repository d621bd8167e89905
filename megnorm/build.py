"""The only wiring: configuration to objects."""

from collections.abc import Callable

import torch
from torch import nn

from megnorm.config import Config
from megnorm.engine.engine import Engine
from megnorm.engine.optimizer import adamw
from megnorm.engine.pipeline import make_stage
from megnorm.model.decoder import Decoder, Layer, TokenLoss, decoder_layers, through, tied_logits
from megnorm.model.init import initialise
from megnorm.model.norm import check_device
from megnorm.model.routing import Routing
from megnorm.model.scale import StepClock
from megnorm.norms import placement_of
from megnorm.parallel.groups import Groups
from megnorm.plan.stages import block_bounds


def build_module(config: Config, groups: Groups) -> nn.Module:
    """This rank's part of the model, with its initial weights.

    It carries what the engine drives: ``clock``, the training step, ``token_loss``, and ``routing``.
    """
    model, clock, routing = config.model, StepClock(0), Routing(config.model)
    check_device(model.norm.backend, groups.device)
    placement = placement_of(model)
    layers = decoder_layers(model, placement, config.parallel.recompute, groups.tp, groups.cp, clock, groups.ep,
                            routing)
    loss = TokenLoss(model.vocab_size, groups.tp, model.z_loss)
    if groups.layout.pp > 1:
        module = make_stage(layers, _layer_bounds(layers, block_bounds(config, groups.layout.pp)), through,
                            tied_logits, groups.layout, loss)
    else:
        module = Decoder(layers, loss)
    module.clock, module.token_loss, module.routing = clock, loss, routing
    module.to(groups.device)
    initialise(module.parameters(), config.seed)
    return module


def build_engine(config: Config, groups: Groups, module: nn.Module | None = None,
                 make_optimizer: Callable[[list[dict]], torch.optim.Optimizer] | None = None) -> Engine:
    """The engine around ``module`` (default: a newly built one), with AdamW unless another is given."""
    module = module if module is not None else build_module(config, groups)
    return Engine(module, config, groups, make_optimizer or adamw(config.optimizer))


def _layer_bounds(layers: list[Layer], blocks: list[int]) -> list[int]:
    """Bounds over all layers: what stands before the first block goes with it, what follows the last too."""
    names = [layer.name for layer in layers]
    return [0, *(names.index(f"layers.{block}") for block in blocks[1:-1]), len(layers)]
