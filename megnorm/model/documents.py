"""Where the documents of a micro batch's rows lie: which position a token has, which earlier tokens it sees."""

from functools import cached_property

import torch
from torch import Tensor


class Documents:
    """One micro batch's, for all blocks of a stage.

    positions i64 [b, s]: of the tokens at hand, as rotary takes them. ids i32 [b, S]: of whole rows, also where this
    rank holds a part of them (context parallelism); the tokens of one document have the same and stand together,
    and see only each other. Padding has a negative one; it stands last in a row.
    """

    def __init__(self, positions: Tensor, ids: Tensor):
        self.positions, self.ids = positions, ids
        self.turns: dict[torch.dtype, tuple[Tensor, Tensor]] = {}  # what Rotary found for the positions

    @cached_property
    def real(self) -> Tensor:
        """bool [b, S]: tokens, where the others are padding."""
        return self.ids >= 0

    @cached_property
    def begins(self) -> Tensor:
        """i64 [b, S]: the place in the row at which the document of each token begins."""
        places = torch.arange(self.ids.shape[1], device=self.ids.device)
        is_first = torch.ones_like(self.ids, dtype=torch.bool)
        is_first[:, 1:] = self.ids[:, 1:] != self.ids[:, :-1]
        return torch.where(is_first, places, 0).cummax(1).values

    @cached_property
    def spans(self) -> list[list[tuple[int, int]]]:
        """For each row: first place and end of each document."""
        length = self.begins.shape[1]
        firsts = [sorted(set(row)) for row in self.begins.tolist()]
        return [list(zip(row, [*row[1:], length], strict=True)) for row in firsts]

    @cached_property
    def block_mask(self):
        """For flex_attention: place i sees j <= i of its document."""
        from torch.nn.attention.flex_attention import create_block_mask

        begins = self.begins
        (rows, length), device = begins.shape, begins.device
        return create_block_mask(lambda b, h, i, j: (j <= i) & (j >= begins[b, i]), rows, None, length, length,
                                 device=device)
