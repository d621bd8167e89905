"""Chunks of records to arrays of tokens, in this process or in several."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import numpy as np

from megnorm.data.command import ToolFailure
from megnorm.data.errors import DataError
from megnorm.data.fast_encoders import Encoder, check_parity, make_encoder
from megnorm.data.indexed import best_dtype
from megnorm.data.readers import BadLine, Chunk, parse_chunk
from megnorm.data.tokenizers import Tokenizer, load_tokenizer

# So much of one text of each chunk is also tokenized by the tokenizer itself.
_CHECKED_CHARS = 1000


@dataclass(frozen=True)
class EncoderOptions:
    """What a worker needs to know; `backend` is settled, not "auto"."""

    tokenizer_type: str
    tokenizer_model: str | None
    backend: str
    json_keys: tuple[str, ...]
    append_eod: bool


@dataclass
class EncodedChunk:
    """A chunk's documents as tokens: for each key the tokens, i32 lengths and UTF-8 bytes of the texts."""

    tokens: list[np.ndarray]
    lengths: list[np.ndarray]
    eod_tokens: list[int]
    text_bytes: list[int]
    records: int
    blank: int
    bad: list[BadLine]


class ChunkEncoder:
    """Parses and tokenizes chunks; each process has its own."""

    def __init__(self, options: EncoderOptions, tokenizer: Tokenizer, encoder: Encoder) -> None:
        self._options, self._tokenizer, self._encoder = options, tokenizer, encoder
        self._dtype = best_dtype(tokenizer.vocab_size)

    def encode(self, chunk: Chunk) -> EncodedChunk:
        """The documents of a chunk, in its order."""
        parsed = parse_chunk(chunk, self._options.json_keys)
        out = EncodedChunk([], [], [], [], chunk.next_line - chunk.first_line, parsed.blank, parsed.bad)
        for k in range(len(self._options.json_keys)):
            texts = [document[k] for document in parsed.documents]
            ids, lengths = self._ids(texts)
            # As Megatron does, an empty document stays empty.
            filled = lengths > 0 if self._options.append_eod else np.zeros(len(lengths), bool)
            out.tokens.append(insert_ends(ids, lengths, filled, self._tokenizer.eod, self._dtype))
            out.lengths.append(lengths + filled)
            out.eod_tokens.append(int(np.count_nonzero(filled)))
            out.text_bytes.append(sum(len(text) if text.isascii() else len(text.encode()) for text in texts))
        return out

    def _ids(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        ids, lengths = self._encoder.encode(texts)
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self._tokenizer.vocab_size:
            raise ToolFailure(
                f"the tokenizer gave id {ids.max()}, its vocabulary has {self._tokenizer.vocab_size}"
            )
        if self._encoder.backend != "native" and texts:
            try:
                check_parity(self._tokenizer, self._encoder, [texts[len(texts) // 2][:_CHECKED_CHARS]])
            except DataError as error:
                raise ToolFailure(str(error)) from None
        return ids, lengths


def insert_ends(
    ids: np.ndarray, lengths: np.ndarray, filled: np.ndarray, end: int | None, dtype: np.dtype
) -> np.ndarray:
    """`ids` as `dtype` with `end` behind each document that is `filled` (bool, one a document)."""
    places = np.cumsum(lengths, dtype=np.int64)[filled]
    if len(places) == 0:
        return ids.astype(dtype)
    places += np.arange(len(places))
    out = np.empty(len(ids) + len(places), dtype)
    others = np.ones(len(out), bool)
    others[places] = False
    out[others] = ids
    out[places] = end
    return out


_encoder: list[ChunkEncoder] = []  # of this worker process


def _start_worker(options: EncoderOptions, inherited: tuple[Tokenizer, Encoder] | None, parent: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    if inherited is None:
        tokenizer = load_tokenizer(options.tokenizer_type, options.tokenizer_model)
        inherited = tokenizer, make_encoder(tokenizer, options.backend)
    _encoder[:] = [ChunkEncoder(options, *inherited)]


def _end_with_parent(parent: int) -> None:
    """A killed parent can't stop its workers, so they look for it."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _encode_in_worker(chunk: Chunk) -> EncodedChunk:
    return _encoder[0].encode(chunk)


def encode_chunks(
    options: EncoderOptions, tokenizer: Tokenizer, encoder: Encoder, chunks: Iterable[Chunk], workers: int
) -> Iterator[tuple[Chunk, EncodedChunk]]:
    """The chunks with what they give, in order. Raises ToolFailure when a worker process dies."""
    if workers == 1:
        alone = ChunkEncoder(options, tokenizer, encoder)
        for chunk in chunks:
            yield chunk, alone.encode(chunk)
        return
    # A forked worker starts at once with the encoder that is there; no thread of ours runs yet (the bar comes
    # later). Elsewhere forking isn't safe, and each worker makes its own.
    forks = sys.platform == "linux"
    context = multiprocessing.get_context("fork" if forks else "spawn")
    arguments = (options, (tokenizer, encoder) if forks else None, os.getpid())
    pool = ProcessPoolExecutor(workers, context, _start_worker, arguments)
    try:
        yield from _in_order(pool, chunks, 2 * workers)
    except BrokenProcessPool:
        raise ToolFailure(
            "a worker process died (killed, or out of memory?); try fewer --workers; the same command again "
            "continues where this one stopped"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _in_order(
    pool: ProcessPoolExecutor, chunks: Iterable[Chunk], ahead: int
) -> Iterator[tuple[Chunk, EncodedChunk]]:
    """Results in the order of the chunks, with at most `ahead` chunks in memory."""
    waiting: deque[tuple[Chunk, Future[EncodedChunk]]] = deque()
    for chunk in chunks:
        waiting.append((chunk, pool.submit(_encode_in_worker, chunk)))
        if len(waiting) >= ahead:
            first, result = waiting.popleft()
            yield first, result.result()
    while waiting:
        first, result = waiting.popleft()
        yield first, result.result()
