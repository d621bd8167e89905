"""Runs of equal layers."""

from megnorm.config.placement import Block


def fold(blocks: tuple[Block, ...]) -> list[tuple[int, int, Block]]:
    """Runs of equal blocks as (first layer, last layer, block), layers from 0."""
    runs: list[tuple[int, int, Block]] = []
    for layer, block in enumerate(blocks):
        if runs and runs[-1][2] == block:
            runs[-1] = (runs[-1][0], layer, block)
        else:
            runs.append((layer, layer, block))
    return runs
