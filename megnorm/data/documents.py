"""Where the documents of a sample begin and end: positions, attention, loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Segment = tuple[int, int, int]  # document, offset in it, tokens


@dataclass(frozen=True)
class RowDocuments:
    """One row of a batch, s tokens.

    positions i64 [s]: from 0 in each document (of a document that began in an earlier row, from the row's
    beginning), as Megatron's --reset-position-ids. documents i32 [s]: 0, 1, ... for the documents of the row,
    -1 for padding; attention within documents lets i see j <= i where documents[i] == documents[j].
    targets bool [s]: the label is a token, not padding. ends bool [s]: the label is a token of another
    document.
    """

    positions: np.ndarray
    documents: np.ndarray
    targets: np.ndarray
    ends: np.ndarray


def row_documents(segments: Sequence[Segment], sequence_length: int) -> RowDocuments:
    """From the pieces of a sample of `sequence_length` + 1 tokens, or fewer and then padded.

    Documents end where the corpus says so, whether or not an end-of-document token stands there.
    """
    lengths = [tokens for _, _, tokens in segments]
    present = sum(lengths)
    assert 0 < present <= sequence_length + 1
    lengths.append(sequence_length + 1 - present)  # padding
    ids = np.repeat(np.array([*range(len(segments)), -1], np.int32), lengths)
    starts = np.cumsum(lengths) - lengths
    places = np.arange(sequence_length + 1)
    positions = places - np.repeat(starts, lengths)
    targets = places[1:] < present
    return RowDocuments(positions[:-1], ids[:-1], targets, (ids[1:] != ids[:-1]) & targets)


def document_edges(documents: np.ndarray) -> np.ndarray:
    """i32: where the documents of a batch begin, its rows [b, s] one behind the other, and the end b * s.

    The `cu_seqlens` of attention kernels for sequences of different lengths.
    """
    rows, length = documents.shape
    changes = np.ones(rows * length + 1, bool)
    flat = documents.reshape(-1)
    changes[1:-1] = flat[1:] != flat[:-1]
    changes[np.arange(rows) * length] = True
    return np.flatnonzero(changes).astype(np.int32)
