"""Which blocks stand on which pipeline stage."""

from megnorm.config import ModelConfig
from megnorm.plan.layout import stage_bounds
from megnorm.plan.parameters import attention_matrices, ffn_matrices


def block_bounds(model: ModelConfig, stages: int) -> list[int]:
    """stages + 1 bounds over the blocks, balanced by the matrix elements that a token meets; the output layer
    counts on the last stage, the embedding's lookup nowhere. Every stage has at least one block.
    """
    weights = [attention_matrices(model) + ffn_matrices(model)] * model.layers
    weights[-1] += model.hidden * model.padded_vocab
    return stage_bounds(weights, stages)
