"""Runs of equal layers."""

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def fold(blocks: Iterable[T]) -> list[tuple[int, int, T]]:
    """Runs of equal blocks as (first layer, last layer, block), layers from 0."""
    runs: list[tuple[int, int, T]] = []
    for layer, block in enumerate(blocks):
        if runs and runs[-1][2] == block:
            runs[-1] = (runs[-1][0], layer, block)
        else:
            runs.append((layer, layer, block))
    return runs
