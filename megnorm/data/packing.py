"""Samples of whole documents: best-fit packing, with bins counted by how much room they have.

Source: Ding et al. 2024, "Fewer Truncations Improve Language Modeling", arXiv:2404.10830.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np

from megnorm.data.errors import DataError
from megnorm.data.lengths import document_lengths
from megnorm.data.samples import Segment, check_sequence_length
from megnorm.data.seeds import derive_key, permutation

_EPOCHS_KEPT = 2


@dataclass(frozen=True)
class Packing:
    """Bins of at most `capacity` tokens.

    Bins 0 .. len(full) - 1 are filled by a part of one long document each: `full` [n, 2] its number and the
    part's. Bin len(full) + j holds the last parts (or wholes) of the documents
    `items[starts[j] : starts[j + 1]]`, longest first.
    """

    full: np.ndarray
    items: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.full) + len(self.starts) - 1


def pack(lengths: np.ndarray, order: np.ndarray, capacity: int) -> Packing:
    """Best-fit decreasing over documents of `lengths` tokens; equal lengths are taken in their `order`.

    A document beyond the capacity is cut into full bins and a last part. Every token is in one bin, once.
    Documents of one length are placed together: what costs is the number of different lengths.
    """
    lengths = lengths[order]
    whole = lengths // capacity
    long = np.flatnonzero(whole)
    counts = whole[long].astype(np.int64)
    part = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    full = np.stack([np.repeat(order[long].astype(np.int64), counts), part], axis=1)
    rest = (lengths - whole * capacity).astype(np.uint16 if capacity < 1 << 16 else np.int64)
    by_length = np.argsort(rest, kind="stable")  # a radix sort for 16 bits
    histogram = np.bincount(rest, minlength=capacity + 1)
    placements, bins = _place(histogram, capacity)
    return Packing(full, *_fill(placements, bins, order[by_length], np.cumsum(histogram)))


_Placement = tuple[int, int, int, int]  # length, first bin, bins, items for each of them


def _place(histogram: np.ndarray, capacity: int) -> tuple[list[_Placement], int]:
    """Where the items of each length go, longest first: into the fullest bins that take them."""
    ranges: dict[int, list[tuple[int, int]]] = {}  # room -> (first bin, bins)
    rooms: list[int] = []  # keys of ranges, sorted
    placements: list[_Placement] = []
    bins = 0

    def take(room: int, most: int) -> tuple[int, int]:
        first, count = ranges[room].pop()
        if count > most:
            ranges[room].append((first + most, count - most))
            count = most
        if not ranges[room]:
            del ranges[room]
            rooms.pop(bisect.bisect_left(rooms, room))
        return first, count

    def give(room: int, first: int, count: int) -> None:
        if room == 0:
            return
        if room not in ranges:
            ranges[room] = []
            bisect.insort(rooms, room)
        ranges[room].append((first, count))

    for length in range(capacity, 0, -1):
        left = int(histogram[length])
        while left:
            at = bisect.bisect_left(rooms, length)
            room = rooms[at] if at < len(rooms) else capacity
            each = min(room // length, left)
            if at < len(rooms):
                first, count = take(room, left // each)
            else:
                first, count = bins, left // each
                bins += count
            placements.append((length, first, count, each))
            give(room - each * length, first, count)
            left -= each * count
    return placements, bins


def _fill(
    placements: list[_Placement], bins: int, documents: np.ndarray, ends: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(items, starts) of a Packing; `documents` by length, those of length n end at `ends[n]`."""
    per_bin = np.zeros(bins, np.int64)
    for _, first, count, each in placements:
        per_bin[first : first + count] += each
    starts = np.concatenate([[0], np.cumsum(per_bin)])
    items = np.empty(int(starts[-1]), documents.dtype)
    filled = starts[:-1].copy()
    next_item = {}
    for length, first, count, each in placements:
        at = next_item.get(length, int(ends[length - 1]))
        places = filled[first : first + count]
        items[places[:, None] + np.arange(each)] = documents[at : at + count * each].reshape(count, each)
        places += each
        next_item[length] = at + count * each
    return items, starts


class PackedMap:
    """Samples of whole documents without end of at most `sequence_length` + 1 tokens. Arguments: SampleMap's.

    Each epoch packs the documents in another order, so that others meet, and shuffles the samples; how many
    samples an epoch has depends on the lengths alone.
    """

    num_samples = None
    by_sequence, padded = False, True

    def __init__(
        self,
        lengths: np.ndarray,
        documents: np.ndarray,
        document_range: tuple[int, int],
        sequence_length: int,
        seed: int = 0,
        name: str = "",
        shuffle: bool = True,
    ) -> None:
        first, last = document_range
        check_sequence_length(sequence_length)
        self.sequence_length, self.capacity = sequence_length, sequence_length + 1
        self.seed, self.name, self.shuffle = seed, name, shuffle
        self.first_document = first
        self._lengths = document_lengths(lengths, documents, first, last)
        self._epochs: dict[int, tuple[Packing, np.ndarray | None]] = {}
        if not (self._lengths > 1).any():
            raise DataError(f"{name or 'dataset'}: no document has 2 tokens, so there is nothing to predict")
        self.samples_per_epoch = len(self._epoch(0)[0])

    def _epoch(self, epoch: int) -> tuple[Packing, np.ndarray | None]:
        epoch = epoch if self.shuffle else 0
        if epoch not in self._epochs:
            while len(self._epochs) >= _EPOCHS_KEPT:
                self._epochs.pop(next(iter(self._epochs)))
            count = len(self._lengths)
            order = self._permutation("documents", epoch, count) if self.shuffle else np.arange(count)
            packing = pack(self._lengths, order, self.capacity)
            samples = self._permutation("samples", epoch, len(packing)) if self.shuffle else None
            self._epochs[epoch] = packing, samples
        return self._epochs[epoch]

    def _permutation(self, what: str, epoch: int, n: int) -> np.ndarray:
        return permutation(n, derive_key(self.seed, self.name, "packed", what, epoch))

    def segments(self, sample: int) -> list[Segment]:
        """(document, offset in it, tokens) of each document of a sample."""
        if sample < 0:
            raise IndexError(f"sample {sample}, must be >= 0")
        epoch, k = divmod(int(sample), self.samples_per_epoch)
        packing, order = self._epoch(epoch)
        place = k if order is None else int(order[k])
        if place < len(packing.full):
            document, part = packing.full[place].tolist()
            return [(self.first_document + document, part * self.capacity, self.capacity)]
        j = place - len(packing.full)
        items = packing.items[packing.starts[j] : packing.starts[j + 1]].tolist()
        lengths = self._lengths[items].tolist()
        return [
            (self.first_document + document, n - n % self.capacity, n % self.capacity)
            for document, n in zip(items, lengths, strict=True)
        ]
