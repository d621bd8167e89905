"""The .bin/.idx files: round trips, the exact bytes, and every way in which a file can lie."""

from __future__ import annotations

import os
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megnorm.data.errors import DataError
from megnorm.data.indexed import IndexedDataset, IndexedWriter, best_dtype
from megnorm.data.lengths import document_lengths

HEADER = 34


def write(prefix: Path, documents: list[list[int]], dtype: str = "u2") -> IndexedDataset:
    with IndexedWriter(prefix, dtype) as writer:
        for ids in documents:
            writer.add_document(ids)
    return IndexedDataset(prefix)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    documents=st.lists(st.lists(st.integers(0, 65535), max_size=20), max_size=20),
    dtype=st.sampled_from(["u2", "i4", "i8"]),
)
def test_round_trip(tmp_path: Path, documents: list[list[int]], dtype: str) -> None:
    dataset = write(tmp_path / "d", documents, dtype)
    assert dataset.num_documents == len(documents)
    assert [dataset.read_document(k).tolist() for k in range(len(documents))] == documents
    full = [ids for ids in documents if ids]
    assert [dataset.read(k).tolist() for k in range(len(dataset))] == full
    assert dataset.document_lengths().tolist() == [len(ids) for ids in documents]
    assert dataset.lengths.dtype == np.int32 and dataset.documents.dtype == np.int64
    assert dataset.largest_id() == max((i for ids in full for i in ids), default=-1)


def test_index_bytes(tmp_path: Path) -> None:
    """Written out by hand from the format's description: documents [5, 6, 7], [], [8]."""
    write(tmp_path / "d", [[5, 6, 7], [], [8]])
    golden = (
        b"MMIDIDX\x00\x00"
        + b"\x01\x00\x00\x00\x00\x00\x00\x00"  # version
        + b"\x08"  # u16
        + b"\x02\x00\x00\x00\x00\x00\x00\x00"  # sequences
        + b"\x04\x00\x00\x00\x00\x00\x00\x00"  # boundaries
        + b"\x03\x00\x00\x00\x01\x00\x00\x00"  # lengths
        + struct.pack("<2q", 0, 6)  # byte offsets
        + struct.pack("<4q", 0, 1, 1, 2)  # the empty document repeats a boundary
    )
    assert (tmp_path / "d.idx").read_bytes() == golden
    assert (tmp_path / "d.bin").read_bytes() == struct.pack("<4H", 5, 6, 7, 8)


def test_part_of_a_sequence(tmp_path: Path) -> None:
    dataset = write(tmp_path / "d", [[1, 2, 3, 4], [5, 6]])
    assert dataset.read(0, 1, 2).tolist() == [2, 3]
    assert dataset.read(1, 1).tolist() == [6]
    assert not dataset.read(0).flags.writeable
    for wrong in [(0, 3, 2), (0, -1, 2), (0, 5), (2,), (-1,)]:
        with pytest.raises(IndexError):
            dataset.read(*wrong)


def test_document_of_several_sequences_and_modes(tmp_path: Path) -> None:
    """As sentence-split and multimodal datasets have them; our writer makes neither."""
    (tmp_path / "d.bin").write_bytes(struct.pack("<5H", 1, 2, 3, 4, 5))
    index = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, 3, 3)
    index += struct.pack("<3i", 2, 1, 2) + struct.pack("<3q", 0, 4, 6) + struct.pack("<3q", 0, 2, 3)
    for modes in (b"", b"\x00\x00\x00"):
        (tmp_path / "d.idx").write_bytes(index + modes)
        dataset = IndexedDataset(tmp_path / "d")
        assert dataset.read_document(0).tolist() == [1, 2, 3]
        assert dataset.read_document(0, 1, 2).tolist() == [2, 3]
        assert dataset.document_lengths().tolist() == [3, 2]


def test_document_lengths_beyond_32_bits() -> None:
    lengths = np.full(5, 2**31 - 1, np.int32)
    assert document_lengths(lengths, np.array([0, 3, 5])).tolist() == [3 * (2**31 - 1), 2 * (2**31 - 1)]


def test_best_dtype() -> None:
    assert best_dtype(65499) == np.uint16 and best_dtype(65500) == np.int32


def test_id_too_large_for_the_dtype(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="65536"):
        write(tmp_path / "d", [[1], [65536]])
    assert os.listdir(tmp_path) == []


def test_nothing_appears_before_the_end(tmp_path: Path) -> None:
    write(tmp_path / "d", [[1, 2]])
    with pytest.raises(RuntimeError), IndexedWriter(tmp_path / "d", "u2") as writer:
        writer.add_document([3])
        assert IndexedDataset(tmp_path / "d").read(0).tolist() == [1, 2]
        raise RuntimeError
    assert sorted(os.listdir(tmp_path)) == ["d.bin", "d.idx"]
    assert IndexedDataset(tmp_path / "d").read(0).tolist() == [1, 2]


def test_index_is_renamed_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "d", [[1, 2]])
    seen: list[tuple[str, bool]] = []
    replace = os.replace

    def watch(source, target) -> None:
        seen.append((Path(target).name, (tmp_path / "d.idx").exists()))
        replace(source, target)

    monkeypatch.setattr(os, "replace", watch)
    with IndexedWriter(tmp_path / "d", "u2") as writer:
        writer.add_document([3])
        writer.add_sidecar(".meta.json", b"{}")
    assert seen == [("d.bin", False), ("d.meta.json", False), ("d.idx", False)]


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="d.idx: cannot be read"):
        IndexedDataset(tmp_path / "d")
    write(tmp_path / "d_text_document", [[1]])
    with pytest.raises(DataError, match="there is d_text_document"):
        IndexedDataset(tmp_path / "d")
    (tmp_path / "d_text_document.bin").unlink()
    with pytest.raises(DataError, match="document.bin: cannot be read"):
        IndexedDataset(tmp_path / "d_text_document")


def test_every_cut_of_either_file_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "d", [[5, 6, 7], [], [8]])
    for name in ("d.idx", "d.bin"):
        whole = (tmp_path / name).read_bytes()
        for size in [*range(len(whole)), len(whole) + 1]:
            (tmp_path / name).write_bytes((whole + b"\x00")[:size])
            with pytest.raises(DataError, match=name) as caught:
                IndexedDataset(tmp_path / "d")
            assert "\n" not in str(caught.value)
        (tmp_path / name).write_bytes(whole)


def mutated(prefix: Path, at: int, data: bytes) -> None:
    whole = bytearray(Path(f"{prefix}.idx").read_bytes())
    whole[at : at + len(data)] = data
    Path(f"{prefix}.idx").write_bytes(whole)


@pytest.mark.parametrize(
    ("at", "data", "rule"),
    [
        (0, b"X", "not a Megatron index"),
        (9, b"\x02", "version 2"),
        (17, b"\x09", "dtype code 9"),
        (HEADER, struct.pack("<i", -3), "length -3"),
        (HEADER, struct.pack("<2i", 2, 2), "sequence 1 starts at byte 6"),
        (HEADER + 8, struct.pack("<q", 2), "sequence 0 starts at byte 2"),
        (HEADER + 24, struct.pack("<q", 1), "run from 1 to 2"),
        (HEADER + 24, struct.pack("<4q", 0, 2, 1, 2), "boundary 2 .1. is below boundary 1"),
        (HEADER + 24, struct.pack("<4q", 0, 1, 1, 3), "run from 0 to 3"),
    ],
)
def test_each_rule_of_the_index(tmp_path: Path, at: int, data: bytes, rule: str) -> None:
    write(tmp_path / "d", [[5, 6, 7], [], [8]])
    mutated(tmp_path / "d", at, data)
    with pytest.raises(DataError, match=rule) as caught:
        IndexedDataset(tmp_path / "d")
    assert "d.idx" in str(caught.value)


@pytest.mark.parametrize("sequences", [10**9, 2**63, 2**64 - 1])
def test_lying_header_allocates_nothing(tmp_path: Path, sequences: int) -> None:
    write(tmp_path / "d", [[5, 6, 7], [], [8]])
    mutated(tmp_path / "d", 18, struct.pack("<Q", sequences))
    tracemalloc.start()
    with pytest.raises(DataError, match="asks for"):
        IndexedDataset(tmp_path / "d")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


def test_thousand_mutations_never_crash_or_read_beyond(tmp_path: Path) -> None:
    documents = [[5, 6, 7], [], [8], [9, 10]]
    write(tmp_path / "d", documents)
    whole = (tmp_path / "d.idx").read_bytes()
    random = np.random.default_rng(0)
    read = 0
    for _ in range(1000):
        data = bytearray(whole)
        for at in random.integers(0, len(data), random.integers(1, 4)):
            data[at] = random.integers(0, 256)
        (tmp_path / "d.idx").write_bytes(data)
        try:
            dataset = IndexedDataset(tmp_path / "d")
        except DataError:
            continue
        read += 1
        tokens = [i for k in range(dataset.num_documents) for i in dataset.read_document(k).tolist()]
        assert len(tokens) * dataset.dtype.itemsize == 12
    assert read < 200
