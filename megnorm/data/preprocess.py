"""JSONL to indexed datasets: parsed and tokenized by several processes, written in order by one.

A chunk of lines goes to a worker and comes back as token arrays; the parent appends them in the order of the
chunks. Each text is tokenized by itself, so the files are the same for any number of workers.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megnorm.data.command import ToolFailure
from megnorm.data.errors import DataError
from megnorm.data.indexed import IndexedWriter, best_dtype, sync_folder
from megnorm.data.meta import META_SUFFIX, DatasetMeta, TokenizerMeta, relative_to_sidecar
from megnorm.data.preprocess_progress import Progress
from megnorm.data.readers import (
    CHUNK_BYTES,
    BadLine,
    Chunk,
    count_lines,
    expand_inputs,
    parse_lines,
    read_chunks,
)
from megnorm.data.tokenizers import Tokenizer, file_sha256, load_tokenizer


@dataclass(frozen=True)
class PreprocessOptions:
    """What to read, how to tokenize, where to write. Names as in Megatron's preprocess_data.py.

    For each key `<output_prefix>_<key>_document.bin`, `.idx` and `.meta.json` are written. `on_error` is
    "abort" (the first bad line ends the command) or "skip" (bad lines go to
    `<output_prefix>.rejected.jsonl`, byte by byte as they were).
    """

    inputs: tuple[str, ...]
    output_prefix: str
    tokenizer_type: str
    tokenizer_model: str | None = None
    json_keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    workers: int = 1
    on_error: str = "abort"
    chunk_bytes: int = CHUNK_BYTES

    def prefix(self, key: str) -> str:
        """The dataset of a key."""
        return f"{self.output_prefix}_{key}_document"


@dataclass
class EncodedChunk:
    """A chunk's documents as tokens: for each key the tokens, i32 lengths and UTF-8 bytes of the texts."""

    tokens: list[np.ndarray]
    lengths: list[np.ndarray]
    eod_tokens: list[int]
    text_bytes: list[int]
    lines: int
    blank: int
    bad: list[BadLine]


@dataclass
class PreprocessReport:
    """Counts of a finished run; lists have one entry a key."""

    prefixes: list[str]
    documents: int = 0
    skipped: int = 0
    blank: int = 0
    lines: int = 0
    tokens: list[int] = field(default_factory=list)
    eod_tokens: list[int] = field(default_factory=list)
    text_bytes: list[int] = field(default_factory=list)
    seconds: float = 0.0
    rejected: str | None = None


class ChunkEncoder:
    """Parses and tokenizes chunks; each process has its own."""

    def __init__(self, options: PreprocessOptions, tokenizer: Tokenizer | None = None) -> None:
        self._options = options
        self._tokenizer = tokenizer or load_tokenizer(options.tokenizer_type, options.tokenizer_model)
        self._dtype = best_dtype(self._tokenizer.vocab_size)

    def encode(self, chunk: Chunk) -> EncodedChunk:
        """The documents of a chunk, in its order."""
        parsed = parse_lines(chunk, self._options.json_keys)
        out = EncodedChunk([], [], [], [], count_lines(chunk.data), parsed.blank, parsed.bad)
        for k in range(len(self._options.json_keys)):
            texts = [document[k] for document in parsed.documents]
            ids = self._tokenizer.encode(texts)
            eods = 0
            if self._options.append_eod:
                for document in ids:
                    if document:  # as Megatron does, an empty document stays empty
                        document.append(self._tokenizer.eod)
                        eods += 1
            lengths = np.fromiter(map(len, ids), np.int32, len(ids))
            total = int(lengths.sum(dtype=np.int64))
            out.tokens.append(np.fromiter(itertools.chain.from_iterable(ids), self._dtype, total))
            out.lengths.append(lengths)
            out.eod_tokens.append(eods)
            out.text_bytes.append(sum(len(text.encode()) for text in texts))
        return out


_encoder: list[ChunkEncoder] = []  # of this worker process


def _start_worker(options: PreprocessOptions, parent: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    _encoder[:] = [ChunkEncoder(options)]


def _end_with_parent(parent: int) -> None:
    """A killed parent can't stop its workers, so they look for it."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _encode_in_worker(chunk: Chunk) -> EncodedChunk:
    return _encoder[0].encode(chunk)


def preprocess(options: PreprocessOptions) -> PreprocessReport:
    """Tokenizes the inputs into indexed datasets, one a key.

    Raises DataError for bad options, files or (with "abort") lines, ToolFailure when a worker died or the
    counts don't add up. Unless it returns, nothing appears under the final names.
    """
    started = time.perf_counter()
    files, tokenizer = _check(options)
    report = PreprocessReport([options.prefix(key) for key in options.json_keys])
    for counts in (report.tokens, report.eod_tokens, report.text_bytes):
        counts.extend([0] * len(options.json_keys))
    dtype = best_dtype(tokenizer.vocab_size)
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(IndexedWriter(prefix, dtype)) for prefix in report.prefixes]
        rejects = stack.enter_context(_RejectedLines(options))
        progress = stack.enter_context(Progress(sum(file.stat().st_size for file in files)))
        for result in _encoded(options, tokenizer, files, progress):
            _take(result, report, writers, rejects)
            progress.update(sum(result.text_bytes), len(result.lengths[0]), sum(map(len, result.tokens)))
        _check_counts(report, writers)
        report.rejected = rejects.path if report.skipped else None
        sources = [{"path": str(file), "bytes": file.stat().st_size} for file in files]
        for k, writer in enumerate(writers):
            meta = _meta(options, tokenizer, report, k, writer, sources)
            writer.add_sidecar(META_SUFFIX, meta.to_json())
    report.seconds = time.perf_counter() - started
    return report


def _check(options: PreprocessOptions) -> tuple[list[Path], Tokenizer]:
    if options.workers < 1:
        raise DataError(f"--workers {options.workers}, must be at least 1")
    if not options.json_keys or len(set(options.json_keys)) < len(options.json_keys):
        raise DataError(f"--json-keys {' '.join(options.json_keys)}: need different keys, at least one")
    files = expand_inputs(options.inputs)
    tokenizer = load_tokenizer(options.tokenizer_type, options.tokenizer_model)
    if options.append_eod and tokenizer.eod is None:
        raise DataError(f"{options.tokenizer_model}: has no end-of-document token for --append-eod")
    return files, tokenizer


def _encoded(
    options: PreprocessOptions, tokenizer: Tokenizer, files: Sequence[Path], progress: Progress
) -> Iterator[EncodedChunk]:
    """The chunks of all files, encoded, in order."""
    chunks = _all_chunks(options, files, progress)
    if options.workers == 1:
        encoder = ChunkEncoder(options, tokenizer)
        yield from map(encoder.encode, chunks)
        return
    # Fork starts at once, and no thread of ours runs yet (the bar comes later); elsewhere it isn't safe.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    pool = ProcessPoolExecutor(options.workers, context, _start_worker, (options, os.getpid()))
    try:
        yield from _in_order(pool, chunks, 2 * options.workers)
    except BrokenProcessPool:
        raise ToolFailure(
            "a worker process died (killed, or out of memory?); nothing was written; try fewer --workers"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _all_chunks(options: PreprocessOptions, files: Sequence[Path], progress: Progress) -> Iterator[Chunk]:
    for file in files:
        yield from read_chunks(file, options.chunk_bytes, progress.read)
        progress.file_done()


def _in_order(pool: ProcessPoolExecutor, chunks: Iterable[Chunk], ahead: int) -> Iterator[EncodedChunk]:
    """Results in the order of the chunks, with at most `ahead` chunks in memory."""
    waiting: deque[Future[EncodedChunk]] = deque()
    for chunk in chunks:
        waiting.append(pool.submit(_encode_in_worker, chunk))
        if len(waiting) >= ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _take(
    result: EncodedChunk, report: PreprocessReport, writers: Sequence[IndexedWriter], rejects: _RejectedLines
) -> None:
    rejects.add(result.bad)
    documents = len(result.lengths[0])
    if documents + len(result.bad) + result.blank != result.lines:
        raise ToolFailure(f"{result.lines} lines gave {documents} documents and {len(result.bad)} bad lines")
    report.documents += documents
    report.skipped += len(result.bad)
    report.blank += result.blank
    report.lines += result.lines
    for k, writer in enumerate(writers):
        writer.add_documents(result.tokens[k], result.lengths[k])
        report.tokens[k] += len(result.tokens[k])
        report.eod_tokens[k] += result.eod_tokens[k]
        report.text_bytes[k] += result.text_bytes[k]


def _check_counts(report: PreprocessReport, writers: Sequence[IndexedWriter]) -> None:
    """Documents in = documents out + counted skips."""
    if report.documents + report.skipped == 0:
        raise DataError("the inputs hold no document: all lines are blank")
    expected = report.lines - report.skipped - report.blank
    for writer, tokens in zip(writers, report.tokens, strict=True):
        if writer.num_documents != expected or writer.num_tokens != tokens:
            raise ToolFailure(
                f"{report.lines} lines, {report.skipped} skipped, {report.blank} blank, but "
                f"{writer.num_documents} documents written to {writer.prefix}"
            )


def _meta(
    options: PreprocessOptions,
    tokenizer: Tokenizer,
    report: PreprocessReport,
    k: int,
    writer: IndexedWriter,
    sources: list[dict],
) -> DatasetMeta:
    path = tokenizer.path
    identity = TokenizerMeta(
        type=tokenizer.type,
        path=relative_to_sidecar(path, writer.prefix) if path else None,
        sha256=file_sha256(path) if path else None,
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod,
    )
    return DatasetMeta(
        tokenizer=identity,
        documents=report.documents,
        skipped=report.skipped,
        tokens=report.tokens[k],
        eod_tokens=report.eod_tokens[k],
        text_bytes=report.text_bytes[k],
        dtype=writer.dtype.name,
        bin_sha256=writer.bin_sha256,
        sources=sources,
        # Nothing that doesn't change the tokens (workers, chunks): equal data has equal sidecars.
        options={
            "json_key": options.json_keys[k],
            "append_eod": options.append_eod,
            "on_error": options.on_error,
        },
    )


class _RejectedLines:
    """Bad lines: the first ends the run, or all are kept in `<output_prefix>.rejected.jsonl`."""

    def __init__(self, options: PreprocessOptions) -> None:
        self.path = f"{options.output_prefix}.rejected.jsonl"
        self._temporary = Path(f"{self.path}.{os.getpid()}.tmp")
        self._skip = options.on_error == "skip"
        self._count = 0

    def add(self, bad: Sequence[BadLine]) -> None:
        """Takes the bad lines of a chunk."""
        if not bad:
            return
        if not self._skip:
            raise DataError(f"{bad[0]}; --on-error skip leaves such lines out")
        with open(self._temporary, "ab") as file:
            file.writelines(line.data + b"\n" for line in bad)
        for line in bad[: max(0, 10 - self._count)]:
            print(f"skipped {line}", file=sys.stderr)
        self._count += len(bad)

    def __enter__(self) -> _RejectedLines:
        self._temporary.unlink(missing_ok=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            Path(self.path).unlink(missing_ok=True)  # of an earlier run
            if self._count:
                os.replace(self._temporary, self.path)
                sync_folder(Path(self.path).parent)
        self._temporary.unlink(missing_ok=True)
