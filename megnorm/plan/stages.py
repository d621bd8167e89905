"""Which blocks stand on which pipeline stage."""

from itertools import accumulate
from typing import NamedTuple

from megnorm.config import Config, ModelConfig, Moe
from megnorm.config.placement import Block
from megnorm.norms import placement_of
from megnorm.plan.layout import stage_bounds
from megnorm.plan.parameters import attention_matrices, ffn_parts


class PlannedBlock(NamedTuple):
    """A block as the plan sees it: its slots, and the mixture of experts where one stands for its FFN."""

    slots: Block
    moe: Moe | None


def planned_blocks(model: ModelConfig) -> list[PlannedBlock]:
    """Of all layers; equal ones are one object."""
    alike: dict[PlannedBlock, PlannedBlock] = {}
    blocks = [PlannedBlock(slots, model.moe if layer in model.moe_layers else None)
              for layer, slots in enumerate(placement_of(model).blocks)]
    return [alike.setdefault(block, block) for block in blocks]


def block_bounds(config: Config, stages: int) -> list[int]:
    """stages + 1 bounds over the blocks: as ``parallel.stages`` says, or else balanced by the matrix elements
    that a token meets; the output layer counts on the last stage, the embedding's lookup nowhere.
    """
    if config.parallel.stages is not None:
        return [0, *accumulate(config.parallel.stages)]
    model = config.model
    weights = [attention_matrices(model) + ffn_parts(model, layer).met for layer in range(model.layers)]
    weights[-1] += model.hidden * model.padded_vocab
    return stage_bounds(weights, stages)
