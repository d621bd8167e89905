"""Best-fit packing: no token lost or doubled, as few bins as the plain algorithm."""

from __future__ import annotations

import bisect
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megnorm.data.errors import DataError
from megnorm.data.indexed import IndexedDataset, IndexedWriter
from megnorm.data.packing import PackedMap, pack
from megnorm.data.samples import GPTDataset


def packed(lengths: list[int], s: int, **more) -> PackedMap:
    array = np.asarray(lengths, np.int32)
    return PackedMap(array, np.arange(len(array) + 1), (0, len(array)), s, **more)


def plain_bins(lengths: list[int], capacity: int) -> int:
    """Best-fit decreasing, one item after the other."""
    bins, rooms = sum(n // capacity for n in lengths), []
    for length in sorted((n % capacity for n in lengths if n % capacity), reverse=True):
        at = bisect.bisect_left(rooms, length)
        room = rooms.pop(at) if at < len(rooms) else capacity
        bins += room == capacity
        bisect.insort(rooms, room - length)
    return bins


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=80), st.integers(1, 30), st.integers(0, 3))
def test_every_token_is_in_one_sample_of_each_epoch(lengths: list[int], s: int, epoch: int) -> None:
    if max(lengths) < 2:
        return
    order = packed(lengths, s, seed=1)
    seen: dict[int, list[tuple[int, int]]] = {}
    for k in range(order.samples_per_epoch):
        pieces = order.segments(epoch * order.samples_per_epoch + k)
        assert 0 < sum(n for _, _, n in pieces) <= s + 1
        for document, offset, n in pieces:
            seen.setdefault(document, []).append((offset, n))
    for document, length in enumerate(lengths):
        at = 0
        for offset, n in sorted(seen.get(document, [])):
            assert offset == at and n > 0
            at += n
        assert at == length
    assert order.samples_per_epoch == plain_bins(lengths, s + 1)


def test_only_long_documents_are_cut() -> None:
    order = packed([5, 30, 9, 8, 3], 8, shuffle=False)
    pieces = [piece for k in range(order.samples_per_epoch) for piece in order.segments(k)]
    assert sorted(pieces) == [
        (0, 0, 5),
        (1, 0, 9),
        (1, 9, 9),
        (1, 18, 9),
        (1, 27, 3),
        (2, 0, 9),
        (3, 0, 8),
        (4, 0, 3),
    ]


def test_epochs_pack_anew_and_are_pure() -> None:
    lengths = np.random.default_rng(0).integers(1, 40, 500).tolist()
    first, again = packed(lengths, 32, seed=3, name="t"), packed(lengths, 32, seed=3, name="t")
    far = [again.segments(n) for n in range(3 * again.samples_per_epoch, 3 * again.samples_per_epoch + 9)]
    near = [first.segments(n) for n in range(9)]
    assert [again.segments(n) for n in range(9)] == near != far
    assert packed(lengths, 32, seed=4, name="t").segments(0) != near[0]


def test_range_and_padding(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "d", "u2") as writer:
        for ids in ([1], [2, 3], [], [4, 5, 6], [7]):
            writer.add_document(ids)
    dataset = IndexedDataset(tmp_path / "d")
    order = PackedMap(dataset.lengths, dataset.documents, (1, 4), 4, shuffle=False)
    stream = GPTDataset(dataset, order, vocab_size=8)
    assert [stream[n].tolist() for n in range(2)] == [[4, 5, 6, 2, 3]] * 2
    assert GPTDataset(dataset, PackedMap(dataset.lengths, dataset.documents, (0, 2), 4, shuffle=False))[
        0
    ].tolist() == [2, 3, 1, 0, 0]


def test_nothing_to_predict() -> None:
    with pytest.raises(DataError, match="no document has 2 tokens"):
        packed([1, 0, 1], 4)


def test_one_giant_document() -> None:
    packing = pack(np.array([10**7 + 3], np.int64), np.array([0], np.uint32), 1000)
    assert len(packing) == 10**4 + 1 and packing.full[-1].tolist() == [0, 9999]
