"""JSONL to .bin/.idx: the same bytes for any number of workers, nothing lost, errors with their place."""

from __future__ import annotations

import gzip
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import orjson
import pytest

from megnorm.data.command import ToolFailure
from megnorm.data.errors import DataError
from megnorm.data.indexed import IndexedDataset
from megnorm.data.inputs import Piece, expand_inputs
from megnorm.data.inspect import dataset_tokenizer, describe, show_document
from megnorm.data.meta import meta_path, read_meta
from megnorm.data.preprocess import PreprocessOptions, check_counts, preprocess
from megnorm.data.preprocess_progress import Progress
from megnorm.data.readers import read_piece

ROOT = Path(__file__).parents[2]
TEXTS = ["", "first", "ünï 😀", " ", 'line\u2028separator\nand \\ "quotes"', "x" * 3000, "", "last", ""]


def options(tmp_path: Path, *inputs: Path, **more) -> PreprocessOptions:
    more.setdefault("output_prefix", str(tmp_path / "out"))
    more.setdefault("append_eod", True)
    return PreprocessOptions(tuple(map(str, inputs)), tokenizer_type="ByteTokenizer", **more)


def corpus(path: Path, texts: list[str]) -> Path:
    path.write_bytes(b"".join(orjson.dumps({"text": text, "n": i}) + b"\n" for i, text in enumerate(texts)))
    return path


def output(prefix: Path | str) -> dict[str, bytes]:
    return {suffix: Path(f"{prefix}{suffix}").read_bytes() for suffix in (".bin", ".idx", ".meta.json")}


def run_tool(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_documents_come_out_as_they_went_in(tmp_path: Path) -> None:
    report = preprocess(options(tmp_path, corpus(tmp_path / "a.jsonl", TEXTS)))
    dataset = IndexedDataset(report.prefixes[0])
    for k, text in enumerate(TEXTS):
        # As Megatron: an empty document is a document, without a sequence and without an end token.
        assert dataset.read_document(k).tolist() == (list(text.encode()) + [256] if text else [])
    meta = read_meta(report.prefixes[0])
    assert meta is not None
    size = sum(len(text.encode()) for text in TEXTS)
    assert (meta.documents, meta.skipped, meta.text_bytes) == (len(TEXTS), 0, size)
    assert (meta.eod_tokens, meta.tokens) == (6, size + 6)
    assert meta.tokens == report.tokens[0] == dataset.num_tokens
    assert meta.tokenizer.eod_id == 256 and meta.tokenizer_path(report.prefixes[0]) is None


def test_same_bytes_for_any_workers_and_chunks(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    texts = ["y" * int(n) for n in rng.integers(0, 900, 400)]
    source = corpus(tmp_path / "a.jsonl", texts)
    results = []
    for workers, chunk_bytes in [(1, 1 << 20), (1, 500), (3, 4096), (2, 1 << 20)]:
        preprocess(options(tmp_path, source, workers=workers, chunk_bytes=chunk_bytes))
        results.append(output(tmp_path / "out_text_document"))
    assert all(result == results[0] for result in results)


def test_compressed_inputs_give_the_same_tokens(tmp_path: Path) -> None:
    source = corpus(tmp_path / "a.jsonl", TEXTS)
    half = len(source.read_bytes()) // 2
    raw = source.read_bytes()
    forms = {
        "b.jsonl.gz": gzip.compress(raw),
        "c.jsonl.gz": gzip.compress(raw[:half]) + gzip.compress(raw[half:]),
    }
    try:
        import zstandard
    except ImportError:
        pass
    else:
        pack = zstandard.ZstdCompressor().compress
        forms |= {"d.jsonl.zst": pack(raw), "e.jsonl.zst": pack(raw[:half]) + pack(raw[half:])}
    preprocess(options(tmp_path, source))
    plain = output(tmp_path / "out_text_document")
    for name, data in forms.items():
        (tmp_path / name).write_bytes(data)
        preprocess(options(tmp_path, tmp_path / name))
        packed = output(tmp_path / "out_text_document")
        assert (packed[".bin"], packed[".idx"]) == (plain[".bin"], plain[".idx"]), name


def test_line_ends_mark_and_blank_lines(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(b'\xef\xbb\xbf{"text":"a"}\r\n\r\n  \n{"text":"b"}\n\n{"text":"c"}')
    report = preprocess(options(tmp_path, source))
    assert (report.documents, report.blank, report.records) == (3, 3, 6)
    dataset = IndexedDataset(report.prefixes[0])
    assert [bytes(dataset.read(k)[:-1].tolist()) for k in range(3)] == [b"a", b"b", b"c"]


def test_several_files_and_keys(tmp_path: Path) -> None:
    for name in ("p2.jsonl", "p1.jsonl"):
        (tmp_path / name).write_bytes(orjson.dumps({"text": name, "title": "T" + name}) + b"\n")
    report = preprocess(
        options(tmp_path, tmp_path / "p*.jsonl", json_keys=("text", "title"), append_eod=False)
    )
    assert report.prefixes == [str(tmp_path / "out_text_document"), str(tmp_path / "out_title_document")]
    text, title = map(IndexedDataset, report.prefixes)
    assert bytes(text.read(0).tolist()) == b"p1.jsonl" and bytes(title.read(1).tolist()) == b"Tp2.jsonl"


BAD = [
    (b'{"text": "a"', "not JSON"),
    (b'{"text": "\xff"}', "not JSON"),
    (b'{"text": "\\ud800"}', "not JSON"),
    (b'{"body": "a"}', 'no key "text", there are: body'),
    (b'{"text": 5}', "is a int, must be a string"),
    (b'{"text": null}', "must be a string"),
    (b'["text"]', "must be an object"),
]


@pytest.mark.parametrize(("line", "reason"), BAD)
@pytest.mark.parametrize("workers", [1, 2])
def test_bad_line_ends_the_run_with_its_place(tmp_path: Path, line: bytes, reason: str, workers: int) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(b'{"text":"good"}\n' * 70 + b"\n" + line + b"\n" + b'{"text":"good"}\n' * 70)
    with pytest.raises(DataError, match=reason) as caught:
        preprocess(options(tmp_path, source, workers=workers, chunk_bytes=300))
    assert str(caught.value).startswith(f"{source}:72: ")
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_bad_lines_skipped_are_counted_and_kept(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    lines = [item for k, (line, _) in enumerate(BAD) for item in (orjson.dumps({"text": f"good {k}"}), line)]
    source.write_bytes(b"\n".join(lines))
    for workers in (1, 2):
        more = {"on_error": "skip", "workers": workers, "chunk_bytes": 40}
        report = preprocess(options(tmp_path, source, **more))
        assert (report.documents, report.skipped) == (len(BAD), len(BAD))
        assert Path(str(report.rejected)).read_bytes() == b"".join(line + b"\n" for line, _ in BAD)
        dataset = IndexedDataset(report.prefixes[0])
        assert [bytes(dataset.read(k)[:-1].tolist()) for k in range(2)] == [b"good 0", b"good 1"]
        meta = read_meta(report.prefixes[0])
        assert meta is not None and meta.skipped == len(BAD)
    source.write_bytes(b'{"text":"good"}\n')
    assert preprocess(options(tmp_path, source, on_error="skip")).rejected is None
    assert not (tmp_path / "out.rejected.jsonl").exists()  # the earlier run's lines are gone


def test_lost_documents_are_noticed(tmp_path: Path) -> None:
    class Writer:
        num_documents, num_tokens, prefix = 2, 10, "w"

    report = preprocess(options(tmp_path, corpus(tmp_path / "a.jsonl", ["a", "b", "c"])))
    report.tokens = [10]
    with pytest.raises(ToolFailure, match="2 documents written"):
        check_counts(report, [Writer()])  # type: ignore[list-item]


def test_input_errors(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "blank.jsonl").write_bytes(b"\n \n")
    (tmp_path / "empty.jsonl").write_bytes(b"")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text":"a"}\n' * 1000)[:-12])
    (tmp_path / "fake.jsonl.gz").write_bytes(b'{"text":"a"}\n')
    for inputs, message in [
        (["blank.jsonl"], "hold no document"),
        (["empty.jsonl"], "hold no document"),
        (["cut.jsonl.gz"], "cut.jsonl.gz: cannot be read"),
        (["fake.jsonl.gz"], "fake.jsonl.gz: cannot be read"),
        (["none.jsonl"], "no such file"),
        (["none*.jsonl"], "nothing matches"),
        (["d"], "is a folder without files"),
        (["blank.jsonl", "blank.jsonl"], "given twice"),
    ]:
        with pytest.raises(DataError, match=message):
            preprocess(options(tmp_path, *[tmp_path / name for name in inputs]))
    with pytest.raises(DataError, match="--workers 0"):
        preprocess(options(tmp_path, tmp_path / "blank.jsonl", workers=0))
    assert not [name for name in os.listdir(tmp_path) if name.startswith("out")]


def test_chunks_are_whole_lines_with_their_numbers(tmp_path: Path) -> None:
    source = corpus(tmp_path / "a.jsonl", TEXTS)
    for size in (1, 10, 100, 10**6):
        chunks = list(read_piece(Piece(str(source), "jsonl"), ("text",), size))
        assert b"".join(chunk.data for chunk in chunks) == source.read_bytes()
        for chunk in chunks:
            assert chunk.data.endswith(b"\n")
            assert orjson.loads(chunk.data.split(b"\n")[0])["n"] == chunk.first_line - 1
    assert expand_inputs([str(source)]) == [source]


def test_tool_reports_in_one_line_and_exits_2(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text":"a"}\n{"text":}\n')
    arguments = ["--output-prefix", tmp_path / "o", "--tokenizer-type", "ByteTokenizer", "--workers", 2]
    done = run_tool("--input", tmp_path / "a.jsonl", *arguments)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"error: {tmp_path}/a.jsonl:2: not JSON")
    done = run_tool("--input", tmp_path / "a.jsonl", *arguments, "--on-error", "skip", "--append-eod")
    assert done.returncode == 0 and "1 documents, 2 tokens" in done.stdout
    assert "skipped 1 bad records" in done.stdout


def test_starts_without_torch() -> None:
    code = (
        "import sys, runpy; sys.argv = ['x', '--help']\n"
        "try: runpy.run_path('tools/preprocess_data.py', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'sentencepiece', 'tokenizers', 'rich') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.endswith("[]\n")


@pytest.mark.skipif(sys.platform != "linux", reason="finds the workers by /proc")
def test_dead_worker_ends_the_run_and_a_killed_run_leaves_no_worker(tmp_path: Path) -> None:
    source = tmp_path / "pipe.jsonl"
    os.mkfifo(source)  # a reader that waits keeps the run alive for as long as the test needs
    for victim in ("worker", "parent"):
        process = subprocess.Popen(
            [
                *(sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--input", str(source)),
                *(
                    "--output-prefix",
                    str(tmp_path / "o"),
                    "--tokenizer-type",
                    "ByteTokenizer",
                    "--workers",
                    "2",
                ),
            ],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )
        with open(source, "wb", buffering=0) as feed:
            feed.write((b'{"text":"' + b"a" * 1000 + b'"}\n') * 2000)
            workers = wait_for(lambda pid=process.pid: children(pid))
            assert len(workers) == 2
            os.kill(workers[0] if victim == "worker" else process.pid, signal.SIGKILL)
            killed = time.monotonic()
            if victim == "worker":
                feed_until_closed(feed)
        _, message = process.communicate(timeout=20)
        if victim == "worker":
            assert process.returncode == 1 and "a worker process died" in message
            assert time.monotonic() - killed < 5
            assert not (tmp_path / "o_text_document.bin").exists()
        assert wait_for(lambda pids=workers: not any(Path(f"/proc/{pid}/exe").exists() for pid in pids))


def feed_until_closed(feed) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            feed.write((b'{"text":"' + b"b" * 1000 + b'"}\n') * 100)
        except BrokenPipeError:
            return
    raise AssertionError("the run went on without its worker")


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found] if len(found) == 2 else []


def wait_for(condition):
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError("waited 20 s")


def test_inspection(tmp_path: Path) -> None:
    prefix = preprocess(options(tmp_path, corpus(tmp_path / "a.jsonl", TEXTS))).prefixes[0]
    text = describe(prefix)
    assert "9 documents, 6 sequences" in text and "ByteTokenizer" in text
    assert show_document(prefix, 1, 100) == "document 1: 6 tokens, the last is the end of the document\nfirst"
    assert show_document(prefix, 5, 3).endswith("3001 tokens, the first 3\nxxx")
    with pytest.raises(DataError, match="document 9: .* has 0 to 8"):
        show_document(prefix, 9, 100)
    meta_path(prefix).unlink()
    assert "no sidecar" in show_document(prefix, 1, 100) and "tokenizer and sources are unknown" in describe(
        prefix
    )


def test_sidecar_finds_its_tokenizer_after_a_move(tmp_path: Path) -> None:
    from megnorm.data.tokenizer_training import train_sentencepiece

    home = tmp_path / "home"
    home.mkdir()
    source = corpus(home / "a.jsonl", [f"some words number {i}, and others\n" for i in range(3000)])
    train_sentencepiece([str(source)], home / "tok", 320)
    run = PreprocessOptions(
        (str(source),), str(home / "d"), "SentencePieceTokenizer", str(home / "tok.model"), append_eod=True
    )
    preprocess(run)
    home.rename(tmp_path / "moved")
    prefix = tmp_path / "moved" / "d_text_document"
    assert dataset_tokenizer(str(prefix)).vocab_size == 320
    (tmp_path / "moved" / "tok.model").write_bytes(b"")
    with pytest.raises(DataError, match=r"tok\.model"):
        dataset_tokenizer(str(prefix))


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"version": 2}', '{"version": 1, "tokenizer": {}}'])
def test_damaged_sidecar(tmp_path: Path, content: str) -> None:
    assert read_meta(tmp_path / "d") is None
    meta_path(tmp_path / "d").write_text(content)
    with pytest.raises(DataError, match=r"d\.meta\.json"):
        read_meta(tmp_path / "d")


class Clock:
    """A clock that a test turns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("megnorm.data.preprocess_progress.time.perf_counter", lambda: self.now)


def test_a_line_every_30_seconds_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock(monkeypatch)
    with Progress(4_000_000) as progress:
        for second in range(1, 71):
            clock.now = 100.0 + second
            progress.read(second * 10_000)
            progress.update(20_000, 3, 5_000)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "8%  0.0 MB/s  3 docs/s  5,000 tokens/s  ETA 370 s",
        "15%  0.0 MB/s  3 docs/s  5,000 tokens/s  ETA 340 s",
    ]


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    clock = Clock(monkeypatch)
    with Progress(1000) as progress:
        progress.read(1000)
        clock.now += 1
        progress.update(2_000_000, 10, 400_000)
        progress.piece_done(1000)
    shown = capsys.readouterr().err
    assert "100%" in shown and "2.0 MB/s  10 docs/s  400,000 tokens/s" in shown and "ETA" in shown
