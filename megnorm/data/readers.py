"""Reading corpora: inputs to files, files to chunks of whole lines, lines to texts."""

from __future__ import annotations

import codecs
import glob
import gzip
import io
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from megnorm.data.errors import DataError

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Chunk:
    """Whole lines of a file; `first_line` counts from 1."""

    path: str
    first_line: int
    data: bytes


@dataclass(frozen=True)
class BadLine:
    """A line that gives no document, and why."""

    path: str
    line: int
    reason: str
    data: bytes

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}"


@dataclass
class ParsedLines:
    """What a chunk's lines hold: per document one text for each key, bad lines, and blank lines."""

    documents: list[tuple[str, ...]] = field(default_factory=list)
    bad: list[BadLine] = field(default_factory=list)
    blank: int = 0


def expand_inputs(inputs: Sequence[str]) -> list[Path]:
    """Files of paths and glob patterns, in the order given, each pattern's matches sorted.

    Raises DataError for a path that doesn't exist, a pattern that matches nothing, a file named twice.
    """
    files: list[Path] = []
    for entry in inputs:
        if os.path.exists(entry):
            found = [entry]
        else:
            found = sorted(glob.glob(entry, recursive=True))
            if not found:
                raise DataError(f"{entry}: no such file, and nothing matches it as a pattern")
        for name in found:
            path = Path(name)
            if path.is_dir():
                raise DataError(f"{path}: is a folder; give its files, for instance '{path}/*.jsonl'")
            if path in files:
                raise DataError(f"{path}: given twice")
            files.append(path)
    return files


def open_binary(path: Path, raw: BinaryIO) -> BinaryIO:
    """The uncompressed bytes of an open file, by its suffix: .gz, .zst, else as they are."""
    if path.suffix == ".gz":
        return gzip.open(raw)  # type: ignore[return-value]
    if path.suffix == ".zst":
        try:
            import zstandard
        except ImportError:
            raise DataError(f'{path}: .zst needs zstandard: pip install "megnorm[preprocess]"') from None
        return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True))
    return raw


def read_chunks(
    path: Path, chunk_bytes: int = CHUNK_BYTES, on_read: Callable[[int], None] = lambda position: None
) -> Iterator[Chunk]:
    """A file's lines in chunks of about `chunk_bytes` uncompressed bytes, a byte-order mark dropped.

    `on_read` is told the position in the file on disk. Raises DataError when the file can't be read.
    """
    try:
        with open(path, "rb") as raw:
            file, line = open_binary(path, raw), 1
            position = raw.tell if raw.seekable() else lambda: 0  # a pipe has none
            while data := file.read(chunk_bytes):
                data += file.readline()
                if line == 1:
                    data = data.removeprefix(codecs.BOM_UTF8)
                on_read(position())
                yield Chunk(str(path), line, data)
                line += count_lines(data)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise DataError(f"{path}: cannot be read ({reason})") from None
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "zstandard":
            raise
        raise DataError(f"{path}: cannot be read ({' '.join(str(error).split())})") from None


def count_lines(data: bytes) -> int:
    """Lines in a chunk, an unfinished last one included."""
    return data.count(b"\n") + (not data.endswith(b"\n"))


def parse_lines(chunk: Chunk, keys: Sequence[str]) -> ParsedLines:
    """Reads a chunk's lines as JSON objects with a string under each key. Blank lines are no documents."""
    out = ParsedLines()
    # Split at \n only: str.splitlines would also cut at the separators that JSON strings may hold.
    for number, line in enumerate(chunk.data.removesuffix(b"\n").split(b"\n"), chunk.first_line):
        if not line.strip():
            out.blank += 1
            continue
        result = _parse_line(line, keys)
        if isinstance(result, str):
            out.bad.append(BadLine(chunk.path, number, result, line))
        else:
            out.documents.append(result)
    return out


def _parse_line(line: bytes, keys: Sequence[str]) -> tuple[str, ...] | str:
    """The texts under the keys, or the reason why there are none."""
    try:
        record: Any = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return f"not JSON ({error.msg}, column {error.colno})"
    if not isinstance(record, dict):
        return f"a JSON {type(record).__name__}, must be an object"
    texts = []
    for key in keys:
        if key not in record:
            return f'no key "{key}", there are: {", ".join(sorted(record)[:10]) or "none"}'
        if not isinstance(record[key], str):
            return f'"{key}" is a {type(record[key]).__name__}, must be a string'
        texts.append(record[key])
    return tuple(texts)
