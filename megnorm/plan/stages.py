"""Which blocks stand on which pipeline stage."""

from itertools import accumulate

from megnorm.config import Config
from megnorm.plan.layout import stage_bounds
from megnorm.plan.parameters import attention_matrices, ffn_matrices


def block_bounds(config: Config, stages: int) -> list[int]:
    """stages + 1 bounds over the blocks: as ``parallel.stages`` says, or else balanced by the matrix elements
    that a token meets; the output layer counts on the last stage, the embedding's lookup nowhere.
    """
    if config.parallel.stages is not None:
        return [0, *accumulate(config.parallel.stages)]
    model = config.model
    weights = [attention_matrices(model) + ffn_matrices(model)] * model.layers
    weights[-1] += model.hidden * model.padded_vocab
    return stage_bounds(weights, stages)
