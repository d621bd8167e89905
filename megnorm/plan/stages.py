"""Which blocks stand on which pipeline stage."""

from megnorm.config import ModelConfig
from megnorm.plan.layout import stage_bounds


def block_weight(model: ModelConfig) -> int:
    """Matrix elements of one block: what a token costs there."""
    attention = 2 * model.hidden * model.head_size * (model.heads + model.kv_heads)
    matrices = 3 if model.activation == "swiglu" else 2
    return attention + matrices * model.hidden * model.ffn_hidden


def block_bounds(model: ModelConfig, stages: int) -> list[int]:
    """stages + 1 bounds over the blocks, balanced by cost; the output layer counts on the last stage.

    The embedding costs no products. Every stage has at least one block.
    """
    weights = [block_weight(model)] * model.layers
    weights[-1] += model.hidden * model.padded_vocab
    return stage_bounds(weights, stages)
