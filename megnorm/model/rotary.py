"""Rotary positions (Su et al., arXiv:2104.09864), a head's two halves forming the pairs (as in Llama)."""

import torch
from torch import Tensor

from megnorm.model.documents import Documents


class NoPositions:
    """Queries and keys as they are."""

    def __call__(self, x: Tensor, documents: Documents | None = None) -> Tensor:
        return x


class Rotary:
    """Turns channel pairs (i, i + e/2) of position p by the angle p * theta^(-2i/e), taken in fp32.

    part: the tokens at hand are this part of their sequences, counted from 0 (context parallelism).
    It holds no parameters or buffers, so that no cast of a model can touch the angles.
    """

    def __init__(self, head_size: int, theta: float, part: int = 0):
        self.head_size, self.theta, self.part = head_size, theta, part
        self._tables: dict[tuple, tuple[Tensor, Tensor]] = {}

    def table(self, length: int, like: Tensor, documents: Documents | None = None) -> tuple[Tensor, Tensor]:
        """cos and sin [length, e/2], or at documents' own positions [b, 1, length, e/2], in the dtype and on the
        device of ``like``."""
        key, first = (like.dtype, like.device), self.part * length
        if key not in self._tables or len(self._tables[key][0]) < first + length:
            self._tables[key] = self._computed(first + length, like)
        cos, sin = self._tables[key]
        if documents is None:
            return cos[first:first + length], sin[first:first + length]
        if like.dtype not in documents.turns:
            documents.turns[like.dtype] = tuple(f[documents.positions].unsqueeze(1) for f in (cos, sin))
        return documents.turns[like.dtype]

    @torch.inference_mode(False)  # a table first made while sampling serves training later
    def _computed(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(like.dtype, torch.float32)
        exponents = torch.arange(0, self.head_size, 2, dtype=torch.float64) / self.head_size
        frequencies = (self.theta ** -exponents).to(wide)
        angles = torch.arange(length, dtype=wide)[:, None] * frequencies
        return tuple(f(angles).to(like.device, like.dtype) for f in (torch.cos, torch.sin))

    def __call__(self, x: Tensor, documents: Documents | None = None) -> Tensor:
        """x [b, h, s, e] -> the same, turned; positions are those of the row unless documents have their own."""
        cos, sin = self.table(x.shape[-2], x, documents)
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
