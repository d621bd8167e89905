"""The decoder as a list of layers, from which both the whole model and a pipeline's stages are built."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megnorm.config import ModelConfig
from megnorm.config.placement import Placement, Scale
from megnorm.model.block import Block, Merge, Split
from megnorm.model.common import Common
from megnorm.model.core import make_core, recomputed
from megnorm.model.documents import Documents
from megnorm.model.init import ends_init
from megnorm.model.loss import TokenLoss
from megnorm.model.norm import hidden_norm
from megnorm.model.rotary import NoPositions, Rotary
from megnorm.model.routing import Routing
from megnorm.model.scale import StepClock, make_scale
from megnorm.parallel.context import WholeContext
from megnorm.parallel.expert import AllExperts
from megnorm.parallel.linear import VocabEmbedding, vocab_logits
from megnorm.parallel.tensor import Alone

# Tokens [b, s] or the stream of hidden states; or either with what ``Documents`` is made of.
Inputs = Tensor | tuple[Tensor, Tensor, Tensor]


class Layer(NamedTuple):
    """One step of the decoder. ``tied``: it uses the embedding's weight through ``tied_forward``."""

    name: str
    build: Callable[[], nn.Module]
    tied: bool = False


class Output(nn.Module):
    """Scores of the vocabulary slice of this rank: [b, s, d] -> [b, s, v / tp]."""

    def __init__(self, weight: nn.Parameter, tp: Alone):
        super().__init__()
        self.weight, self.tp = weight, tp

    def forward(self, x: Tensor) -> Tensor:
        return vocab_logits(x, self.weight, self.tp)


class Recomputed(nn.Module):
    """Keeps only a block's input; its inner activations are computed again in the backward pass."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, documents: Documents | None = None) -> Tensor:
        return checkpoint(self.block, x, documents, use_reentrant=False, preserve_rng_state=False)


class SoftCap(nn.Module):
    """cap * tanh(x / cap) of each score."""

    def __init__(self, cap: float):
        super().__init__()
        self.cap = cap

    def forward(self, x: Tensor) -> Tensor:
        return self.cap * torch.tanh(x / self.cap)


def decoder_layers(model: ModelConfig, placement: Placement, recompute: str, tp: Alone,
                   cp: WholeContext | None = None, clock: StepClock | None = None, ep: AllExperts | None = None,
                   routing: Routing | None = None) -> list[Layer]:
    """Embedding, its scale and norm, blocks, final norm, output, soft-cap; less what is absent.

    cp, ep: context- and expert-parallel ranks, by default this one alone. clock: the training step, for factors that
    depend on it; by default they are as after the last. routing: where the routers record.
    """
    cp, clock = cp or WholeContext(), clock or StepClock()
    ep, routing = ep or AllExperts(), routing or Routing(model)
    core = make_core(placement.attention_scale, placement.attention_softcap)
    core = cp.around(recomputed(core) if recompute == "selective" else core)
    turn = Rotary(model.head_size, model.rope_theta, cp.rank) if model.positions == "rope" else NoPositions()
    common = Common(model, tp, cp, turn, core, clock, ep, routing)

    def block(number: int) -> nn.Module:
        built = Block(number, placement.blocks[number], placement.streams, common)
        return Recomputed(built) if recompute == "full" else built

    blocks = [Layer(f"layers.{number}", partial(block, number)) for number in range(model.layers)]
    return [*_input_layers(placement, common), *blocks, *_output_layers(placement, common)]


def _input_layers(placement: Placement, common: Common) -> list[Layer]:
    model, tp, d = common.model, common.tp, common.model.hidden
    init, _ = ends_init(model)
    layers = [Layer("embedding", lambda: VocabEmbedding("embedding", model.padded_vocab, d, init=init, tp=tp),
                    tied=model.tie_embeddings)]
    if placement.embed_scale != Scale():
        layers.append(Layer("embed_scale", lambda: make_scale("embed_scale", placement.embed_scale, d, tp,
                                                              common.clock)))
    if placement.embed_norm is not None:
        layers.append(Layer("embed_norm", lambda: _end_norm("embed_norm", placement, common)))
    if placement.streams == "residual":
        layers.append(Layer("split", Split))
    return layers


def _output_layers(placement: Placement, common: Common) -> list[Layer]:
    model, tp, d = common.model, common.tp, common.model.hidden
    embedding_init, init = ends_init(model)
    layers = []
    if placement.streams == "residual":
        layers.append(Layer("final_norm", lambda: Merge(_end_norm("final_norm", placement, common))))
    elif placement.final_norm is not None:
        layers.append(Layer("final_norm", lambda: _end_norm("final_norm", placement, common)))
    if model.tie_embeddings:
        layers.append(Layer("output", lambda: VocabEmbedding("embedding", model.padded_vocab, d,
                                                             init=embedding_init, tp=tp), tied=True))
    else:
        layers.append(Layer("output", lambda: Output(
            VocabEmbedding("output", model.padded_vocab, d, init=init, tp=tp, role="matrix").weight, tp)))
    if placement.final_softcap is not None:
        layers.append(Layer("final_softcap", lambda: SoftCap(placement.final_softcap)))
    return layers


def _end_norm(name: str, placement: Placement, common: Common) -> nn.Module:
    model = common.model
    return hidden_norm(name, getattr(placement, name), model.hidden, common.tp, model.norm.backend)


def tied_logits(embedding: VocabEmbedding, x: Tensor) -> Tensor:
    """The output layer that shares the embedding's weight."""
    return vocab_logits(x, embedding.weight, embedding.tp)


def through(layers: Iterable[Callable], inputs: Inputs) -> Tensor:
    """The stream after the layers; blocks are told where the documents lie."""
    x, *rows = inputs if isinstance(inputs, tuple) else (inputs,)
    documents = Documents(*rows) if rows else None
    for layer in layers:
        x = layer(x, documents) if isinstance(layer, (Block, Recomputed)) else layer(x)
    return x


class Decoder(nn.Module):
    """The whole model on one pipeline stage: tokens [b, s] -> logits [b, s, v / tp], or the loss."""

    def __init__(self, layers: list[Layer], loss: TokenLoss):
        super().__init__()
        self.loss = loss
        self.layers = nn.ModuleList()
        for layer in layers:
            again = layer.tied and len(self.layers) > 0
            self.layers.append(Output(self.layers[0].weight, self.layers[0].tp) if again else layer.build())

    def forward(self, inputs: Inputs, targets: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        x = through(self.layers, inputs)
        return x if targets is None else self.loss(x, (targets, weights))
