"""Corpora to indexed datasets: parsed and tokenized by several processes, written in order by one.

A chunk of records goes to a worker and comes back as token arrays; the parent appends them in the order of
the chunks. Each text is tokenized by itself, so the files are the same for any number of workers, and for a
run that was interrupted and continued.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megnorm.data.command import ToolFailure
from megnorm.data.errors import DataError
from megnorm.data.fast_encoders import Encoder, settle_encoder
from megnorm.data.indexed import IndexedWriter, best_dtype
from megnorm.data.inputs import Piece, expand_inputs, plan_pieces
from megnorm.data.journal import Journal
from megnorm.data.lengths import LengthSummary, summarize_lengths
from megnorm.data.meta import META_SUFFIX, DatasetMeta, TokenizerMeta, file_sha256, relative_to_sidecar
from megnorm.data.preprocess_encode import EncodedChunk, EncoderOptions, encode_chunks
from megnorm.data.preprocess_progress import Progress
from megnorm.data.readers import CHUNK_BYTES, Chunk, lines_before, parse_chunk, read_piece
from megnorm.data.rejected import RejectedRecords
from megnorm.data.tokenizers import Tokenizer, load_tokenizer

_STATE_SECONDS = 2.0  # between two states from which a killed run continues
_PARITY_TEXTS, _PARITY_CHARS = 32, 2000


@dataclass(frozen=True)
class PreprocessOptions:
    """What to read, how to tokenize, where to write. Names as in Megatron's preprocess_data.py.

    For each key `<output_prefix>_<key>_document.bin`, `.idx` and `.meta.json` are written. `on_error` is
    "abort" (the first bad record ends the command) or "skip" (bad lines go to
    `<output_prefix>.rejected.jsonl`, byte by byte as they were). Of `world_size` machines, each with its
    `rank`, every one writes its contiguous share, with its number in the prefix.
    """

    inputs: tuple[str, ...]
    output_prefix: str
    tokenizer_type: str
    tokenizer_model: str | None = None
    json_keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    workers: int = 1
    on_error: str = "abort"
    input_format: str = "auto"
    backend: str = "auto"
    rank: int = 0
    world_size: int = 1
    chunk_bytes: int = CHUNK_BYTES

    @property
    def own_prefix(self) -> str:
        """The output prefix of this machine."""
        if self.world_size == 1:
            return self.output_prefix
        return f"{self.output_prefix}_{self.rank:05d}_of_{self.world_size:05d}"

    def prefix(self, key: str) -> str:
        """The dataset of a key."""
        return f"{self.own_prefix}_{key}_document"


@dataclass
class Counts:
    """What was read and written so far; lists have one entry a key."""

    documents: int = 0
    skipped: int = 0
    blank: int = 0
    records: int = 0
    tokens: list[int] = field(default_factory=list)
    eod_tokens: list[int] = field(default_factory=list)
    text_bytes: list[int] = field(default_factory=list)


@dataclass
class PreprocessReport(Counts):
    """Counts of a finished run, and the documents' lengths for each key."""

    prefixes: list[str] = field(default_factory=list)
    lengths: list[LengthSummary] = field(default_factory=list)
    backend: str = "native"
    seconds: float = 0.0
    continued_documents: int = 0
    rejected: str | None = None


def preprocess(
    options: PreprocessOptions, say: Callable[[str], None] = lambda message: None
) -> PreprocessReport:
    """Tokenizes the inputs into indexed datasets, one a key.

    A run that was killed is continued by the next one with equal options and sources. Raises DataError for
    bad options, files or (with "abort") records, ToolFailure when a worker died or the counts don't add up.
    Unless it returns, nothing appears under the final names.
    """
    started = time.perf_counter()
    files, pieces, tokenizer = _check(options)
    encoder, reason = settle_encoder(tokenizer, options.backend, _sample_texts(options, pieces))
    if reason:
        say(f"tokenizing natively: {reason}")
    stats = {file: _stat(file) for file in files}
    identity = _identity(options, tokenizer, encoder.backend, stats)
    with contextlib.ExitStack() as stack:
        journal = stack.enter_context(Journal(f"{options.own_prefix}.progress", identity))
        if journal.foreign:
            say("an interrupted run with other options or other sources is dropped")
        run = _Run(options, tokenizer, pieces, journal, stack)
        if run.counts.records:
            say(f"continuing an interrupted run behind {run.counts.records:,} records")
        continued = run.counts.documents
        hashes = _SourceHashes([Path(p.path) for p in pieces if p.start == 0])
        run.process(
            EncoderOptions(
                options.tokenizer_type,
                options.tokenizer_model,
                encoder.backend,
                options.json_keys,
                options.append_eod,
            ),
            encoder,
            options.workers,
            hashes.start,
        )
        for file, before in stats.items():
            if _stat(file) != before:
                raise ToolFailure(f"{file}: changed while it was read; nothing was written")
        report = PreprocessReport(**dataclasses.asdict(run.counts), prefixes=[w.prefix for w in run.writers])
        report.backend, report.continued_documents = encoder.backend, continued
        report.lengths = [summarize_lengths(writer.length_blocks()) for writer in run.writers]
        report.rejected = run.rejects.path if report.skipped else None
        sources = hashes.sources(list(dict.fromkeys(piece.path for piece in pieces)))
        for k, writer in enumerate(run.writers):
            meta = _meta(options, tokenizer, report, k, writer, sources)
            writer.add_sidecar(META_SUFFIX, meta.to_json())
    journal.remove()
    report.seconds = time.perf_counter() - started
    return report


class _Run:
    """The files being written, and how far the reading is."""

    def __init__(
        self,
        options: PreprocessOptions,
        tokenizer: Tokenizer,
        pieces: list[Piece],
        journal: Journal,
        stack: contextlib.ExitStack,
    ) -> None:
        self._options, self._tokenizer, self._pieces, self._journal = options, tokenizer, pieces, journal
        dtype = best_dtype(tokenizer.vocab_size)
        prefixes = [options.prefix(key) for key in options.json_keys]
        self.writers = [
            stack.enter_context(IndexedWriter(prefix, dtype, resumable=True)) for prefix in prefixes
        ]
        self.rejects = stack.enter_context(RejectedRecords(options.own_prefix, options.on_error == "skip"))
        self._position = [0, 0, 1]  # piece, end and next line of the last chunk taken
        self.counts = self._restore()

    def _restore(self) -> Counts:
        """The newest recorded state that the files on disk still hold."""
        for state in reversed(self._journal.states):
            counts = Counts(**state["counts"])
            sizes = zip(self.writers, counts.tokens, strict=True)
            if self.rejects.restore(state["rejected"]) and all(
                writer.restore(counts.documents, tokens) for writer, tokens in sizes
            ):
                self._position = state["position"]
                return counts
        self.rejects.restore(0)
        for writer in self.writers:
            writer.restore(0, 0)
        zeros = [0] * len(self.writers)
        return Counts(tokens=[*zeros], eod_tokens=[*zeros], text_bytes=[*zeros])

    def process(
        self, encoding: EncoderOptions, encoder: Encoder, workers: int, when_forked: Callable[[], None]
    ) -> None:
        """Reads and writes everything that is left. `when_forked` is called when the workers run."""
        first_lines: dict[int, int] = {}
        recorded = time.monotonic()
        with Progress(sum(piece.disk_bytes for piece in self._pieces)) as progress:
            places: deque[int] = deque()  # the pieces of the chunks that are under way
            chunks = self._chunks(progress, places)
            for chunk, result in encode_chunks(encoding, self._tokenizer, encoder, chunks, workers):
                when_forked()
                place = places.popleft()
                if result.bad and self._pieces[place].start:
                    before = first_lines.setdefault(place, lines_before(self._pieces[place]))
                    result.bad = [dataclasses.replace(bad, line=bad.line + before) for bad in result.bad]
                self._take(result)
                self._position = [place, chunk.end, chunk.next_line]
                progress.update(sum(result.text_bytes), len(result.lengths[0]), sum(map(len, result.tokens)))
                if time.monotonic() - recorded >= _STATE_SECONDS:
                    self._record()
                    recorded = time.monotonic()
        self._check_counts()

    def _chunks(self, progress: Progress, places: deque[int]) -> Iterator[Chunk]:
        first, done, line = self._position
        for place, piece in enumerate(self._pieces):
            if place >= first:
                start = (done, line) if place == first else (0, 1)
                for chunk in read_piece(
                    piece, self._options.json_keys, self._options.chunk_bytes, *start, progress.read
                ):
                    places.append(place)
                    yield chunk
            progress.piece_done(piece.disk_bytes)

    def _take(self, result: EncodedChunk) -> None:
        counts, documents = self.counts, len(result.lengths[0])
        if documents + len(result.bad) + result.blank != result.records:
            raise ToolFailure(
                f"{result.records} records gave {documents} documents, {len(result.bad)} bad ones"
            )
        self.rejects.add(result.bad)
        counts.documents += documents
        counts.skipped += len(result.bad)
        counts.blank += result.blank
        counts.records += result.records
        for k, writer in enumerate(self.writers):
            writer.add_documents(result.tokens[k], result.lengths[k])
            counts.tokens[k] += len(result.tokens[k])
            counts.eod_tokens[k] += result.eod_tokens[k]
            counts.text_bytes[k] += result.text_bytes[k]

    def _record(self) -> None:
        for file in (*self.writers, self.rejects):
            file.sync()
        self._journal.add(
            {
                "counts": dataclasses.asdict(self.counts),
                "rejected": self.rejects.size,
                "position": self._position,
            }
        )

    def _check_counts(self) -> None:
        if self.counts.documents + self.counts.skipped == 0 and self._options.world_size == 1:
            raise DataError("the inputs hold no document: all lines are blank")
        check_counts(self.counts, self.writers)


def check_counts(counts: Counts, writers: Sequence[IndexedWriter]) -> None:
    """Documents in = documents out + counted skips; raises ToolFailure."""
    expected = counts.records - counts.skipped - counts.blank
    for writer, tokens in zip(writers, counts.tokens, strict=True):
        if writer.num_documents != expected or writer.num_tokens != tokens:
            raise ToolFailure(
                f"{counts.records} records, {counts.skipped} skipped, {counts.blank} blank, but "
                f"{writer.num_documents} documents written to {writer.prefix}"
            )


def _check(options: PreprocessOptions) -> tuple[list[Path], list[Piece], Tokenizer]:
    if options.workers < 1:
        raise DataError(f"--workers {options.workers}, must be at least 1")
    if not options.json_keys or len(set(options.json_keys)) < len(options.json_keys):
        raise DataError(f"--json-keys {' '.join(options.json_keys)}: need different keys, at least one")
    files = expand_inputs(options.inputs, options.input_format)
    pieces = plan_pieces(files, options.input_format, options.rank, options.world_size)
    tokenizer = load_tokenizer(options.tokenizer_type, options.tokenizer_model)
    if options.append_eod and tokenizer.eod is None:
        raise DataError(f"{options.tokenizer_model}: has no end-of-document token for --append-eod")
    mine = {piece.path for piece in pieces}
    return [file for file in files if str(file) in mine], pieces, tokenizer


def _sample_texts(options: PreprocessOptions, pieces: Sequence[Piece]) -> Iterator[str]:
    """Beginnings of the first texts, to compare a fast encoder with the tokenizer itself."""
    if options.tokenizer_type == "ByteTokenizer" or options.backend == "native":
        return
    regular = (piece for piece in pieces if Path(piece.path).is_file())  # a pipe can be read only once
    for piece in itertools.islice(regular, 1):
        for chunk in itertools.islice(read_piece(piece, options.json_keys, 1 << 16), 1):
            documents = parse_chunk(chunk, options.json_keys).documents
            yield from (texts[0][:_PARITY_CHARS] for texts in documents[:_PARITY_TEXTS])


def _stat(file: Path) -> list[int]:
    stat = file.stat()
    return [stat.st_size, stat.st_mtime_ns] if file.is_file() else [0, 0]


def _identity(
    options: PreprocessOptions, tokenizer: Tokenizer, backend: str, stats: dict[Path, list[int]]
) -> dict[str, Any]:
    """What a run must share with an interrupted one to continue it; the number of workers may differ."""
    said = dataclasses.asdict(options)
    for name in ("workers", "inputs", "tokenizer_model"):
        del said[name]
    return {
        "options": {**said, "json_keys": list(options.json_keys), "backend": backend},
        "tokenizer": file_sha256(tokenizer.path) if tokenizer.path else None,
        "sources": [[str(file), *stat] for file, stat in stats.items()],
    }


class _SourceHashes:
    """Hashes the sources in a thread of its own, which leaves the interpreter free while it does."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files, self._hashes, self._error = files, dict[str, str](), None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begins, unless it has; not before the workers are forked."""
        if self._thread is not None:
            return
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for file in self._files:
                if file.is_file():
                    self._hashes[str(file)] = file_sha256(file)
        except OSError as error:
            self._error = error

    def sources(self, paths: Sequence[str]) -> list[dict[str, Any]]:
        """Path, size and digest of each source; None for a pipe or a file that another machine hashes."""
        if self._thread is None:
            self._run()
        else:
            self._thread.join()
        if self._error:
            raise self._error
        return [{"path": p, "bytes": os.stat(p).st_size, "sha256": self._hashes.get(p)} for p in paths]


def _meta(
    options: PreprocessOptions,
    tokenizer: Tokenizer,
    report: PreprocessReport,
    k: int,
    writer: IndexedWriter,
    sources: list[dict[str, Any]],
) -> DatasetMeta:
    path = tokenizer.path
    identity = TokenizerMeta(
        type=tokenizer.type,
        path=relative_to_sidecar(path, writer.prefix) if path else None,
        sha256=file_sha256(path) if path else None,
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod,
    )
    # Nothing that doesn't change the tokens (workers, chunks): equal data has equal sidecars.
    said = {
        "json_key": options.json_keys[k],
        "append_eod": options.append_eod,
        "on_error": options.on_error,
        "backend": report.backend,
    }
    if options.world_size > 1:
        said["shard"] = [options.rank, options.world_size]
    return DatasetMeta(
        tokenizer=identity,
        documents=report.documents,
        skipped=report.skipped,
        tokens=report.tokens[k],
        eod_tokens=report.eod_tokens[k],
        text_bytes=report.text_bytes[k],
        dtype=writer.dtype.name,
        bin_sha256=writer.bin_sha256,
        idx_sha256=writer.seal(),
        sources=sources,
        options=said,
    )
