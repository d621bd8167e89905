"""Killed at any moment and started again: the files of an undisturbed run, and no work done twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import orjson
import pytest

from megnorm.data import preprocess as module
from megnorm.data.command import ToolFailure
from megnorm.data.errors import DataError
from megnorm.data.journal import Journal
from megnorm.data.preprocess import PreprocessOptions, preprocess

ROOT = Path(__file__).parents[2]
SUFFIXES = (".bin", ".idx", ".meta.json")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    lines = [orjson.dumps({"text": "y" * int(n), "b": str(n)}) for n in random.integers(0, 900, 300)]
    lines[50] = lines[150] = lines[290] = b"bad"
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    return tmp_path / "a.jsonl"


def options(source: Path, name: str = "out", **more) -> PreprocessOptions:
    said = {"append_eod": True, "on_error": "skip", "json_keys": ("text", "b"), "chunk_bytes": 5000, **more}
    return PreprocessOptions((str(source),), str(source.parent / name), "ByteTokenizer", **said)


def output(source: Path, name: str = "out") -> dict[str, bytes]:
    folder = source.parent
    names = [f"{name}_{key}_document{suffix}" for key in ("text", "b") for suffix in SUFFIXES]
    return {n.removeprefix(name): (folder / n).read_bytes() for n in [*names, f"{name}.rejected.jsonl"]}


def killed(source: Path, moment: str, workers: int = 1) -> None:
    """Runs the preprocessing in a process that kills itself at a moment: python that patches something."""
    code = (
        "import os, signal, sys; sys.path.insert(0, 'tests/unit')\n"
        "from pathlib import Path\n"
        "from megnorm.data import indexed, preprocess as module\n"
        "from test_data_continue import options\n"
        "die = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)\n"
        "module._STATE_SECONDS = 0\n"
        f"{moment}\n"
        f"module.preprocess(options(Path({str(source)!r}), workers={workers}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60
    )
    assert done.returncode == -signal.SIGKILL


AFTER_CHUNKS = """
count, add = [0], indexed.IndexedWriter.add_documents
def patched(self, *arguments):
    add(self, *arguments)
    count[0] += 1
    if count[0] == {n}: die()
indexed.IndexedWriter.add_documents = patched
"""
MOMENTS = {
    "first chunk": AFTER_CHUNKS.format(n=1),
    "between two keys": AFTER_CHUNKS.format(n=21),
    "late": AFTER_CHUNKS.format(n=40),
    "before a state": "module.Journal.add = die",
    "within a state": "import megnorm.data.journal as j; n = [0]; sync = os.fsync\n"
    "def late(f):\n    n[0] += 1\n    sync(f) if n[0] < 30 else die()\nos.fsync = late",
    "index": "indexed.IndexedWriter._write_index = die",
    "first name": "os.replace = die",
    "between the names": "n = [0]; move = os.replace\n"
    "def late(*a):\n    n[0] += 1\n    move(*a) if n[0] < 4 else die()\nos.replace = late",
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_and_started_again(source: Path, moment: str) -> None:
    preprocess(options(source, "right"))
    killed(source, MOMENTS[moment])
    report = preprocess(options(source))
    assert output(source) == output(source, "right")
    if moment in ("late", "index"):
        assert report.continued_documents > 100
    left = {p.name for p in source.parent.iterdir() if not p.name.startswith(("right", "out_", "a.jsonl"))}
    assert left == {"out.rejected.jsonl"}
    assert not list(source.parent.glob("*.part"))


def test_killed_again_and_again_with_other_workers(source: Path) -> None:
    preprocess(options(source, "right"))
    for n, workers in ((12, 2), (12, 1), (14, 3)):
        killed(source, AFTER_CHUNKS.format(n=n), workers)
    assert preprocess(options(source)).continued_documents > 50
    assert output(source) == output(source, "right")


def test_compressed_and_row_inputs_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gzip

    pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow, of the extra preprocess")
    import pyarrow

    texts = [str(k) * (k % 50) for k in range(500)]
    lines = b"".join(orjson.dumps({"text": text}) + b"\n" for text in texts)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    pq.write_table(pyarrow.table({"text": texts}), tmp_path / "b.parquet", row_group_size=60)
    (tmp_path / "c.txt").write_text("text")

    def said(name: str) -> PreprocessOptions:
        inputs = tuple(str(tmp_path / n) for n in ("a.jsonl.gz", "b.parquet", "c.txt"))
        return PreprocessOptions(inputs, str(tmp_path / name), "ByteTokenizer", chunk_bytes=1000)

    preprocess(said("right"))
    monkeypatch.setattr(module, "_STATE_SECONDS", 0)
    for chunks in (7, 9, 11, 8, 10):
        with monkeypatch.context() as patch:
            interrupt_after(patch, chunks)
            with pytest.raises(KeyboardInterrupt):
                preprocess(said("out"))
    assert preprocess(said("out")).continued_documents > 500
    for suffix in SUFFIXES:
        files = [tmp_path / f"{name}_text_document{suffix}" for name in ("right", "out")]
        assert files[0].read_bytes() == files[1].read_bytes()


def interrupt_after(patch: pytest.MonkeyPatch, chunks: int) -> None:
    """Ctrl-C when so many chunks were taken."""
    take, seen = module._Run._take, []

    def stopping(self, result) -> None:
        if len(seen) == chunks:
            raise KeyboardInterrupt
        seen.append(result)
        take(self, result)

    patch.setattr(module._Run, "_take", stopping)


def interrupted(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, "_STATE_SECONDS", 0)
        interrupt_after(patch, 10)
        with pytest.raises(KeyboardInterrupt):
            preprocess(options(source))


@pytest.mark.parametrize("change", ["options", "source", "lost part"])
def test_another_run_is_not_continued(source: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    interrupted(source, monkeypatch)
    more, said = {}, []
    if change == "options":
        more = {"chunk_bytes": 4000}
    elif change == "source":
        source.write_bytes(source.read_bytes() + b'\n{"text":"z","b":"c"}')
    else:
        (source.parent / "out_b_document.bin.part").unlink()
    report = preprocess(options(source, **more), said.append)
    assert report.continued_documents == 0
    assert (said == []) == (change == "lost part")
    preprocess(options(source, "right"))
    assert output(source) == output(source, "right")


def test_a_source_that_changes_while_read_is_noticed(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take = module._Run._take

    def touching(self, result) -> None:
        take(self, result)
        os.utime(source, ns=(0, time.time_ns()))

    monkeypatch.setattr(module._Run, "_take", touching)
    with pytest.raises(ToolFailure, match="changed while it was read"):
        preprocess(options(source))
    assert not list(source.parent.glob("*.idx"))


def test_two_runs_with_one_output(source: Path) -> None:
    with Journal(source.parent / "out.progress", {}), pytest.raises(DataError, match="held by another run"):
        preprocess(options(source))
    (source.parent / "out.progress").unlink()


def test_a_torn_journal_counts_as_far_as_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with Journal(path, {"id": 1}) as journal:
        journal.add({"n": 1})
        journal.add({"n": 2})
    path.write_bytes(path.read_bytes()[:-5])
    with Journal(path, {"id": 1}) as journal:
        assert journal.states == [{"n": 1}] and not journal.foreign
    with Journal(path, {"id": 2}) as journal:
        assert journal.states == [] and journal.foreign


def test_sources_are_named_with_their_digests(source: Path) -> None:
    import hashlib

    meta = orjson.loads(output_after(source)["_text_document.meta.json"])
    data = source.read_bytes()
    assert meta["sources"] == [
        {"path": str(source), "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    ]
    assert meta["bin_sha256"] == hashlib.sha256(output(source)["_text_document.bin"]).hexdigest()
    assert meta["idx_sha256"] == hashlib.sha256(output(source)["_text_document.idx"]).hexdigest()


def output_after(source: Path) -> dict[str, bytes]:
    preprocess(options(source))
    return output(source)
