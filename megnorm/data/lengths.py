"""How long the documents of a corpus are, without copies of what is mapped from disk."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

_BLOCK = 1 << 20
# Lengths below are counted one by one, the few above are kept.
_COUNTED = 1 << 20
QUANTILES = (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)


def document_lengths(
    lengths: np.ndarray, documents: np.ndarray, first: int = 0, last: int | None = None
) -> np.ndarray:
    """Tokens of the documents [first, last), from sequence lengths [N] and boundaries [D + 1].

    Where each document is one sequence this is a slice of `lengths`, without a copy.
    """
    last = len(documents) - 1 if last is None else last
    count, start = last - first, int(documents[first])
    if int(documents[last]) - start == count and _all_steps_one(documents, first, last):
        return lengths[start : start + count]
    out = np.empty(count, np.int64)
    for a in range(first, last, _BLOCK):
        b = min(a + _BLOCK, last)
        edges = documents[a : b + 1] - documents[a]
        sums = np.concatenate([[0], np.cumsum(lengths[documents[a] : documents[b]], dtype=np.int64)])
        out[a - first : b - first] = np.diff(sums[edges])
    return out if count and out.max() > np.iinfo(np.int32).max else out.astype(np.int32)


def _all_steps_one(documents: np.ndarray, first: int, last: int) -> bool:
    for a in range(first, last, _BLOCK):
        if not (np.diff(documents[a : min(a + _BLOCK, last) + 1]) == 1).all():
            return False
    return True


@dataclass(frozen=True)
class LengthSummary:
    """Documents by length in tokens: `counts[n]` documents have n, `longer` holds the others, sorted."""

    counts: np.ndarray
    longer: np.ndarray

    @property
    def documents(self) -> int:
        """All documents."""
        return int(self.counts.sum()) + len(self.longer)

    @property
    def empty(self) -> int:
        """Documents without a token."""
        return int(self.counts[0])

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.counts @ np.arange(len(self.counts))) + int(self.longer.sum(dtype=np.int64))

    def quantiles(self, fractions: Sequence[float] = QUANTILES) -> list[int]:
        """Length of the document at place ceil(fraction * documents) of the sorted ones, exactly."""
        below = np.cumsum(self.counts)
        out = []
        for fraction in fractions:
            place = max(1, math.ceil(fraction * self.documents))
            over = place - int(below[-1])
            out.append(int(self.longer[over - 1]) if over > 0 else int(np.searchsorted(below, place)))
        return out

    def histogram(self) -> list[tuple[int, int, int]]:
        """(first, last, documents) for the lengths 0, 1, 2-3, 4-7, ... up to the longest."""
        edges = [0, *(1 << k for k in range(33))]
        rows = [
            (
                a,
                b - 1,
                int(self.counts[a:b].sum()) + int(np.count_nonzero((self.longer >= a) & (self.longer < b))),
            )
            for a, b in zip(edges, edges[1:], strict=False)
        ]
        longest = self.quantiles((1.0,))[0] if self.documents else 0
        return [row for row in rows if row[0] <= longest]


def summarize_lengths(blocks: Iterable[np.ndarray]) -> LengthSummary:
    """Counts lengths that come in blocks."""
    counts = np.zeros(_COUNTED, np.int64)
    longer: list[np.ndarray] = []
    for block in blocks:
        short = block < _COUNTED
        found = np.bincount(block[short])
        counts[: len(found)] += found
        if not short.all():
            longer.append(block[~short].astype(np.int64))
    return LengthSummary(counts, np.sort(np.concatenate(longer)) if longer else np.empty(0, np.int64))


def describe_quantiles(summary: LengthSummary) -> str:
    """The quantiles in one line."""
    values = zip(QUANTILES, summary.quantiles(), strict=True)
    mean = summary.tokens / max(summary.documents, 1)
    return "   ".join(f"{q:.0%}: {value:,}" for q, value in values) + f"   mean: {mean:,.1f}"
