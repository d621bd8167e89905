"""Verification, merging and cutting of datasets; damaged and lying files."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import orjson
import pytest

from megnorm.data.combine import merge, split
from megnorm.data.errors import DataError
from megnorm.data.indexed import IndexedDataset, IndexedWriter
from megnorm.data.inspect import histogram
from megnorm.data.lengths import summarize_lengths
from megnorm.data.meta import meta_path, read_meta
from megnorm.data.preprocess import PreprocessOptions, preprocess
from megnorm.data.verify import verify

TEXTS = ["alpha", "", "be", "gamma delta", "x", ""]
HEADER = 34


def dataset(tmp_path: Path, name: str = "d", texts: list[str] = TEXTS, **more) -> str:
    source = tmp_path / f"{name}.jsonl"
    source.write_bytes(b"".join(orjson.dumps({"text": text}) + b"\n" for text in texts))
    said = {"append_eod": True, **more}
    return preprocess(
        PreprocessOptions((str(source),), str(tmp_path / name), "ByteTokenizer", **said)
    ).prefixes[0]


def faults(prefix: str) -> str:
    return "\n".join(verify(prefix)[1])


def patch(path: str, at: int, data: bytes) -> None:
    whole = bytearray(Path(path).read_bytes())
    whole[at : at + len(data)] = data
    Path(path).write_bytes(whole)


def test_a_sound_dataset(tmp_path: Path) -> None:
    held, found = verify(dataset(tmp_path))
    assert found == [] and len(held) == 5
    meta_path(tmp_path / "d_text_document").unlink()
    assert verify(str(tmp_path / "d_text_document")) == (held[:1], [])
    assert len(verify(str(tmp_path / "d_text_document"), 257)[0]) == 2


@pytest.mark.parametrize("with_sidecar", [True, False])
def test_faults_are_found(tmp_path: Path, with_sidecar: bool) -> None:
    prefix = dataset(tmp_path)
    if not with_sidecar:
        meta_path(prefix).unlink()
    files = {suffix: Path(prefix + suffix).read_bytes() for suffix in (".bin", ".idx")}
    for suffix, damage, message in [
        (".bin", lambda b: b[:-1], r"\.bin: .* the file is cut"),
        (".idx", lambda b: b[:-1], r"\.idx: .* the file is cut"),
        (".idx", lambda b: b[:-16] + struct.pack("<2q", 1, 4), "boundary 6 .4. is|boundary 5 .1. is below"),
        (".bin", lambda b: b[:2] + struct.pack("<H", 300) + b[4:], r"token id 300 at token 1 \(document 0\)"),
    ]:
        Path(prefix + suffix).write_bytes(damage(files[suffix]))
        found = "\n".join(verify(prefix, 257)[1])
        assert __import__("re").search(message, found), found
        Path(prefix + suffix).write_bytes(files[suffix])
    assert verify(prefix, 257)[1] == []


def test_faults_that_only_the_sidecar_shows(tmp_path: Path) -> None:
    prefix = dataset(tmp_path)
    whole = Path(prefix + ".bin").read_bytes()
    patch(prefix + ".bin", 0, struct.pack("<H", 65))
    assert "isn't the file that the sidecar describes" in faults(prefix)
    Path(prefix + ".bin").write_bytes(whole)
    patch(prefix + ".bin", 10, struct.pack("<H", 65))
    assert "document 0 doesn't end with the end-of-document token 256" in faults(prefix)
    Path(prefix + ".bin").write_bytes(whole)
    patch(prefix + ".bin", 0, struct.pack("<H", 256))
    assert "5 end-of-document tokens, but 4 documents" in faults(prefix)
    Path(prefix + ".bin").write_bytes(whole)
    # Documents 0 and 1 change places: every rule of the index still holds.
    patch(prefix + ".idx", HEADER + 12 * 4 + 8, struct.pack("<2q", 0, 1))
    assert "isn't the index that" in faults(prefix)


def test_a_thousand_mutations_give_an_error_or_the_right_data(tmp_path: Path) -> None:
    prefix = dataset(tmp_path)
    whole = Path(prefix + ".idx").read_bytes()
    right = [IndexedDataset(prefix).read_document(k).tolist() for k in range(len(TEXTS))]
    random = np.random.default_rng(0)
    errors = 0
    for _ in range(1000):
        data = bytearray(whole)
        for at in random.integers(0, len(data), random.integers(1, 4)):
            data[at] = random.integers(0, 256)
        Path(prefix + ".idx").write_bytes(data)
        try:
            found = IndexedDataset(prefix)
            assert [found.read_document(k).tolist() for k in range(len(TEXTS))] == right
        except DataError as error:
            errors += 1
            assert "\n" not in str(error)
        assert bytes(data) == whole or verify(prefix)[1]
    assert errors > 950


def test_beyond_31_bits_in_sparse_files(tmp_path: Path) -> None:
    """Three sequences of 2^30 tokens: byte offsets and token counts above 2^31, in files without blocks."""
    n = 1 << 30
    with open(tmp_path / "d.bin", "wb") as file:
        file.truncate(3 * n * 2)
        for place, value in ((2 * n, 7), (3 * n - 1, 9)):
            file.seek(place * 2)
            file.write(struct.pack("<H", value))
    index = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, 3, 3) + struct.pack("<3i", n, n, n)
    (tmp_path / "d.idx").write_bytes(
        index + struct.pack("<3q", 0, 2 * n, 4 * n) + struct.pack("<3q", 0, 2, 3)
    )
    found = IndexedDataset(tmp_path / "d")
    assert found.num_tokens == 3 * n > 2**31
    assert found.document_lengths().tolist() == [2 * n, n] and found.document_lengths().dtype == np.int64
    assert found.read_document(1, 0, 2).tolist() == [7, 0]
    assert found.read_document(1, n - 1).tolist() == [9]
    assert found.read_document(0, 2 * n - 1).tolist() == [0]


def test_merge(tmp_path: Path) -> None:
    first, second = dataset(tmp_path, "a"), dataset(tmp_path, "b", ["one", "two"])
    assert merge([first, second, first], str(tmp_path / "m")) == 14
    merged, meta = IndexedDataset(tmp_path / "m"), read_meta(tmp_path / "m")
    texts = [bytes(merged.read_document(k).tolist()[:-1]).decode() for k in range(14)]
    assert texts == TEXTS + ["one", "two"] + TEXTS
    assert meta is not None and meta.documents == 14 and len(meta.sources) == 2
    assert meta.text_bytes == sum(map(len, texts))
    assert verify(str(tmp_path / "m"))[1] == []


def test_what_does_not_fit_is_not_merged(tmp_path: Path) -> None:
    first = dataset(tmp_path, "a")
    with IndexedWriter(tmp_path / "wide", "i4") as writer:
        writer.add_document([70000])
    with IndexedWriter(tmp_path / "bare", "u2") as writer:
        writer.add_document([7])
    shares = [dataset(tmp_path, "s", ["a" * 50] * 9, rank=rank, world_size=3) for rank in range(3)]
    other = dataset(tmp_path, "o")
    meta = orjson.loads(meta_path(other).read_bytes())
    meta["tokenizer"]["vocab_size"] = 300
    meta_path(other).write_bytes(orjson.dumps(meta))
    for prefixes, message in [
        ([first, str(tmp_path / "wide")], "int32 and uint16, must be one dtype"),
        ([first, str(tmp_path / "bare")], "has no sidecar"),
        ([first, other], "another tokenizer"),
        ([shares[0], shares[2], shares[1]], "the shares are"),
        (shares[:2], "the shares are"),
        ([first, shares[0]], "the shares are"),
        ([first, str(tmp_path / "m")], "cannot be read"),
    ]:
        with pytest.raises(DataError, match=message):
            merge(prefixes, str(tmp_path / "m"))
        assert not [name for name in os.listdir(tmp_path) if name.startswith("m.")]
    with pytest.raises(DataError, match="is one of the inputs"):
        merge([first], first)


def test_split_and_merge_is_the_whole(tmp_path: Path) -> None:
    prefix = dataset(tmp_path, texts=[f"text {k}" * (k % 5) for k in range(100)])
    parts = split(prefix, str(tmp_path / "p"), "80,15,5")
    assert list(parts.values()) == [80, 15, 5]
    for part in parts:
        assert verify(part)[1] == []
        meta = read_meta(part)
        assert meta is not None and meta.text_bytes == meta.tokens - meta.eod_tokens
    merge(list(parts), str(tmp_path / "m"))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"m{suffix}").read_bytes() == Path(prefix + suffix).read_bytes()
    assert list(split(prefix, str(tmp_path / "q"), "1,0,0")) == [str(tmp_path / "q_train")]


def test_lengths_in_words(tmp_path: Path) -> None:
    lines = histogram(dataset(tmp_path)).splitlines()
    assert lines[0].split() == ["tokens", "documents"]
    assert [line.split()[0] for line in lines[1:]] == ["0", "1", "2", "4", "8"]
    random = np.random.default_rng(0)
    lengths = np.concatenate([random.integers(0, 3000, 999), [5 << 20, 3 << 20, 1 << 20]])
    summary = summarize_lengths([lengths[:100].astype(np.int32), lengths[100:]])
    assert (
        summary.quantiles((0.0, 0.5, 0.9, 0.998, 1.0))
        == np.quantile(lengths, [0.0, 0.5, 0.9, 0.998, 1.0], method="inverted_cdf").astype(int).tolist()
    )
    assert (summary.documents, summary.tokens) == (1002, int(lengths.sum()))
    assert sum(count for _, _, count in summary.histogram()) == 1002
    assert summarize_lengths([]).histogram() == [(0, 0, 0)]
