"""Inputs: Parquet, text, datasets folders, Unicode, shares of several machines."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megnorm.data.combine import merge
from megnorm.data.errors import DataError
from megnorm.data.indexed import IndexedDataset
from megnorm.data.inputs import expand_inputs, plan_pieces
from megnorm.data.preprocess import PreprocessOptions, preprocess

pa = pytest.importorskip("pyarrow", reason="pyarrow, of the extra preprocess")
pq = pytest.importorskip("pyarrow.parquet")
TEXTS = ["", "first", "ünï 😀 e\u0301", "x" * 3000, "line\nline\r\nend", "last", ""] * 30


def options(tmp_path: Path, *inputs: Path, **more) -> PreprocessOptions:
    more.setdefault("output_prefix", str(tmp_path / "out"))
    return PreprocessOptions(
        tuple(map(str, inputs)),
        tokenizer_type="ByteTokenizer",
        append_eod=True,
        **{"chunk_bytes": 2000, **more},
    )


def texts_of(prefix: str | Path) -> list[str]:
    dataset = IndexedDataset(prefix)
    ids = [dataset.read_document(k).tolist() for k in range(dataset.num_documents)]
    assert all(not document or document[-1] == 256 for document in ids)
    return [bytes(document[:-1]).decode() for document in ids]


def table(texts: list[str | None], kind=None) -> pa.Table:
    return pa.table({"n": range(len(texts)), "text": pa.array(texts, kind or pa.string())})


def write_arrow(path: Path, data: pa.Table, file: bool = False) -> None:
    with (pa.ipc.new_file if file else pa.ipc.new_stream)(str(path), data.schema) as writer:
        writer.write_table(data, max_chunksize=50)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())]
)
def test_parquet(tmp_path: Path, kind: pa.DataType, workers: int) -> None:
    column = pa.array(TEXTS, pa.string())
    column = column.dictionary_encode() if pa.types.is_dictionary(kind) else column.cast(kind)
    pq.write_table(
        pa.table({"n": range(len(TEXTS)), "text": column}), tmp_path / "a.parquet", row_group_size=40
    )
    report = preprocess(options(tmp_path, tmp_path / "a.parquet", workers=workers))
    assert texts_of(report.prefixes[0]) == TEXTS
    assert report.documents == report.records == len(TEXTS)


@pytest.mark.parametrize("file", [False, True])
def test_arrow(tmp_path: Path, file: bool) -> None:
    write_arrow(tmp_path / "a.arrow", table(TEXTS), file)
    assert texts_of(preprocess(options(tmp_path, tmp_path / "a.arrow")).prefixes[0]) == TEXTS


def save_to_disk(folder: Path, parts: list[list[str]]) -> None:
    """What `datasets.Dataset.save_to_disk` writes."""
    folder.mkdir(parents=True)
    names = [f"data-{k:05d}-of-{len(parts):05d}.arrow" for k in range(len(parts))]
    for name, texts in zip(names, parts, strict=True):
        write_arrow(folder / name, table(texts))
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": n} for n in names], "_split": "train"})
    )


def test_datasets_folder(tmp_path: Path) -> None:
    save_to_disk(tmp_path / "d" / "train", [TEXTS[:50], TEXTS[50:]])
    assert texts_of(preprocess(options(tmp_path, tmp_path / "d" / "train")).prefixes[0]) == TEXTS
    (tmp_path / "d" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(DataError, match="holds the datasets train; name one"):
        expand_inputs([str(tmp_path / "d")])
    state = tmp_path / "d" / "train" / "state.json"
    for content, message in [
        ('{"_data_files": [{"filename": "../../x.arrow"}]}', "outside of its folder"),
        ('{"_data_files": [], "_indices_files": [{"filename": "i.arrow"}]}', "flatten_indices"),
        ("[]", "not written by datasets"),
    ]:
        state.write_text(content)
        with pytest.raises(DataError, match=message):
            expand_inputs([str(tmp_path / "d" / "train")])


def test_text_files_are_documents(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    (folder / "b").mkdir(parents=True)
    (folder / "b" / "2.txt").write_bytes(b"\xef\xbb\xbfsecond\r\n")
    (folder / "1.txt").write_bytes("fïrst\n".encode())
    (folder / "3.txt").write_bytes(b"")
    (folder / "4.txt.gz").write_bytes(gzip.compress(b"packed"))
    (folder / ".hidden").write_bytes(b"no")
    report = preprocess(options(tmp_path, folder))
    assert texts_of(report.prefixes[0]) == ["fïrst\n", "", "packed", "second\r\n"]
    (folder / "5.py").write_bytes(b"x = 1")
    with pytest.raises(DataError, match=r"5\.py: the suffix says no format"):
        preprocess(options(tmp_path, folder))
    assert len(texts_of(preprocess(options(tmp_path, folder, input_format="text")).prefixes[0])) == 5
    with pytest.raises(DataError, match="a text file has no keys"):
        preprocess(options(tmp_path, folder / "1.txt", json_keys=("body",)))


def test_bad_records_of_every_format(tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_bytes(b"ok \xff")
    pq.write_table(table(["a", None, "b"]), tmp_path / "null.parquet")
    raw = pa.table({"text": pa.array([b"a", b"\xff", b"b"], pa.binary())})
    pq.write_table(raw, tmp_path / "bytes.parquet")
    for name, message in [
        ("bad.txt", r"bad.txt:1: not UTF-8 \(byte 3\)"),
        ("null.parquet", 'null.parquet:2: "text" is null'),
        ("bytes.parquet", "bytes.parquet:2: not UTF-8"),
    ]:
        with pytest.raises(DataError, match=message):
            preprocess(options(tmp_path, tmp_path / name))
        report = preprocess(options(tmp_path, tmp_path / name, on_error="skip"))
        assert report.skipped == 1
        assert orjson.loads(Path(str(report.rejected)).read_bytes())["file"] == str(tmp_path / name)


def test_wrong_files(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": [1], "body": ["x"]}), tmp_path / "a.parquet")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-9])
    (tmp_path / "no.arrow").write_bytes(b"nothing of the kind")
    for name, keys, message in [
        ("a.parquet", ("text",), 'no column "text", there are: n, body'),
        ("a.parquet", ("n",), 'column "n" is int64, must be a string'),
        ("cut.parquet", ("text",), "not a Parquet file"),
        ("no.arrow", ("text",), "cannot be read"),
    ]:
        with pytest.raises(DataError, match=message) as caught:
            preprocess(options(tmp_path, tmp_path / name, json_keys=keys))
        assert "\n" not in str(caught.value)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(st.text(max_size=60), min_size=1, max_size=20),
    ending=st.sampled_from(["\n", "\r\n"]),
    ascii=st.booleans(),
    mark=st.booleans(),
    chunk=st.sampled_from([1, 64, 1 << 20]),
)
def test_any_text_comes_back(tmp_path: Path, texts, ending, ascii, mark, chunk) -> None:
    lines = [json.dumps({"text": text}, ensure_ascii=ascii) for text in texts]
    data = ("\ufeff" if mark else "") + ending.join(lines) + ending
    (tmp_path / "a.jsonl").write_bytes(data.encode())
    assert (
        texts_of(preprocess(options(tmp_path, tmp_path / "a.jsonl", chunk_bytes=chunk)).prefixes[0]) == texts
    )


@pytest.mark.parametrize("escape", [r"\ud83d", r"\ude00", r"a\ud83db"])
def test_lone_surrogates_are_bad_lines(tmp_path: Path, escape: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "\\ud83d\\ude00"}\n{"text": "' + escape + '"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2: not JSON"):
        preprocess(options(tmp_path, tmp_path / "a.jsonl"))
    report = preprocess(options(tmp_path, tmp_path / "a.jsonl", on_error="skip"))
    assert texts_of(report.prefixes[0]) == ["😀"]


def corpus(tmp_path: Path) -> list[Path]:
    """Files of several formats and sizes, an empty one among them."""
    lines = [orjson.dumps({"text": f"{k} {text}"}) + b"\n" for k, text in enumerate(TEXTS)]
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[:80])))
    (tmp_path / "c.jsonl").write_bytes(b"")
    pq.write_table(table(TEXTS[:99]), tmp_path / "d.parquet", row_group_size=7)
    (tmp_path / "e.txt").write_bytes(b"one text")
    (tmp_path / "f.jsonl").write_bytes(b"".join(lines[::-1]).removesuffix(b"\n"))
    return [tmp_path / name for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl", "d.parquet", "e.txt", "f.jsonl")]


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_shares_merge_to_the_bytes_of_one(tmp_path: Path, world: int) -> None:
    files = corpus(tmp_path)
    whole = preprocess(options(tmp_path, *files))
    prefixes = []
    for rank in range(world):
        shared = {"output_prefix": str(tmp_path / "share"), "rank": rank, "world_size": world}
        prefixes += preprocess(options(tmp_path, *files, workers=1 + rank % 2, **shared)).prefixes
    if world > 1:
        assert prefixes[1].endswith(f"share_00001_of_{world:05d}_text_document")
    merge(prefixes, str(tmp_path / "merged"))
    for suffix in (".bin", ".idx", ".meta.json"):
        merged = (tmp_path / f"merged{suffix}").read_bytes()
        assert merged == Path(f"{whole.prefixes[0]}{suffix}").read_bytes(), suffix


@pytest.mark.parametrize("world", [2, 5])
def test_a_bad_line_of_a_share_keeps_its_number(tmp_path: Path, world: int) -> None:
    lines = [b'{"text": "good"}'] * 100
    lines[93] = b"bad"
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    with pytest.raises(DataError, match=r"a\.jsonl:94: not JSON"):
        preprocess(options(tmp_path, tmp_path / "a.jsonl", rank=world - 1, world_size=world))


def test_more_machines_than_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text":"a"}\n')
    found = [plan_pieces([tmp_path / "a.jsonl"], rank=r, world=40) for r in range(40)]
    assert sum(map(len, found)) == 13
    prefixes = []
    for rank in range(40):
        prefixes += preprocess(options(tmp_path, tmp_path / "a.jsonl", rank=rank, world_size=40)).prefixes
    assert merge(prefixes, str(tmp_path / "m")) == 1
    with pytest.raises(DataError, match="--rank 40 of --world-size 40"):
        plan_pieces([tmp_path / "a.jsonl"], rank=40, world=40)


def test_one_giant_document(tmp_path: Path) -> None:
    text = "".join(map(chr, np.random.default_rng(0).integers(97, 123, 3_000_000)))
    (tmp_path / "a.jsonl").write_bytes(orjson.dumps({"text": text}) + b"\n")
    assert texts_of(preprocess(options(tmp_path, tmp_path / "a.jsonl")).prefixes[0]) == [text]
