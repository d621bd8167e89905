"""Small decoders for tests: any placement, every weight random (gains and biases too), by global name."""

import torch
from torch import Tensor

from megnorm.config import ModelConfig
from megnorm.config.placement import Placement
from megnorm.model.decoder import Decoder, TokenLoss, decoder_layers
from megnorm.model.init import initialise
from megnorm.model.scale import StepClock
from megnorm.norms import placement_of
from megnorm.parallel.tensor import Alone


def model_config(**changes) -> ModelConfig:
    """2 layers, d 32, 4 heads over 2 key/value heads, FFN 48, vocabulary 29 in 32 rows."""
    sizes = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn_hidden": 48, "vocab_size": 29,
             "pad_vocab_to": 32, "init": {"std": 0.2}}
    return ModelConfig.model_validate({**sizes, **changes})


def decoder(model: ModelConfig, placement: Placement | None = None, dtype: torch.dtype = torch.float64,
            recompute: str = "none", step: int = 0) -> Decoder:
    """The model on one rank in a training step; gains spread around 1 and biases around 0."""
    placement, tp = placement or placement_of(model), Alone()
    layers = decoder_layers(model, placement, recompute, tp, clock=StepClock(step))
    module = Decoder(layers, TokenLoss(model.vocab_size, tp))
    module.to(dtype)
    initialise(module.parameters(), seed=5)
    stream = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.sharding.role in ("norm", "bias"):
                parameter += 0.3 * torch.randn(parameter.shape, generator=stream, dtype=dtype)
    return module


def weights(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Parameters by global name."""
    return {parameter.sharding.name: parameter for parameter in module.parameters()}


def tokens_of(model: ModelConfig, batch: int = 2, length: int = 12, seed: int = 0) -> tuple[Tensor, Tensor]:
    """tokens and targets [b, s]."""
    ids = torch.randint(model.vocab_size, (batch, length + 1), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def relative(got: Tensor, right: Tensor) -> float:
    """Norm of the difference over the norm of the right value."""
    return ((got - right).norm() / right.norm().clamp_min(1e-30)).item()
