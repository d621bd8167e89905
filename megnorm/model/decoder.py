"""The decoder as a list of layers, from which both the whole model and a pipeline's stages are built."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megnorm.config import ModelConfig
from megnorm.config.placement import Placement
from megnorm.model.block import Block
from megnorm.model.init import init_std
from megnorm.model.norm import hidden_norm
from megnorm.model.rotary import Rotary
from megnorm.parallel.cross_entropy import cross_entropy
from megnorm.parallel.linear import VocabEmbedding, vocab_logits
from megnorm.parallel.tensor import Alone


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

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False, preserve_rng_state=False)


def decoder_layers(model: ModelConfig, placement: Placement, recompute: str, tp: Alone) -> list[Layer]:
    """Embedding, embedding norm if any, blocks, final norm if any, output."""
    std, rotary, d = init_std(model), Rotary(model.head_size, model.rope_theta), model.hidden
    vocab = model.padded_vocab

    def embedding(name: str = "embedding") -> nn.Module:
        return VocabEmbedding(name, vocab, d, init=std.embedding, tp=tp)

    def block(number: int) -> Callable[[], nn.Module]:
        def build() -> nn.Module:
            built = Block(number, model, placement.blocks[number], std, rotary, tp)
            return Recomputed(built) if recompute == "full" else built
        return build

    def norm(name: str) -> list[Layer]:
        chosen = getattr(placement, name)
        return [Layer(name, lambda: hidden_norm(name, chosen, d, tp))] if chosen is not None else []

    output = (Layer("output", embedding, tied=True) if model.tie_embeddings
              else Layer("output", lambda: Output(embedding("output").weight, tp)))
    return [Layer("embedding", embedding, tied=model.tie_embeddings), *norm("embed_norm"),
            *(Layer(f"layers.{number}", block(number)) for number in range(model.layers)),
            *norm("final_norm"), output]


def tied_logits(embedding: VocabEmbedding, x: Tensor) -> Tensor:
    """The output layer that shares the embedding's weight."""
    return vocab_logits(x, embedding.weight, embedding.tp)


class TokenLoss:
    """Weighted sum of the tokens' cross entropies; the weights already hold the mean's denominator."""

    def __init__(self, vocab: int, tp: Alone):
        self.vocab, self.tp = vocab, tp

    def __call__(self, logits: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
        """logits [b, s, v / tp], labels = (targets [b, s], weights [b, s]) -> scalar."""
        targets, weights = labels
        return (cross_entropy(logits, targets, self.vocab, self.tp) * weights).sum()


class Decoder(nn.Module):
    """The whole model on one pipeline stage: tokens [b, s] -> logits [b, s, v / tp], or the loss."""

    def __init__(self, layers: list[Layer], loss: TokenLoss):
        super().__init__()
        self.loss = loss
        built = [layer.build() for layer in layers if not (layer.tied and layer.name == "output")]
        if layers[-1].tied:
            built.append(Output(built[0].weight, built[0].tp))
        self.layers = nn.ModuleList(built)

    def forward(self, tokens: Tensor, targets: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        x = tokens
        for layer in self.layers:
            x = layer(x)
        return x if targets is None else self.loss(x, (targets, weights))
