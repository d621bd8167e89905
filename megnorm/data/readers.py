"""Reading corpora: pieces of files to chunks of records, records to texts."""

from __future__ import annotations

import codecs
import gzip
import io
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from megnorm.data.errors import DataError
from megnorm.data.inputs import Piece
from megnorm.data.tokenizers import one_line

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Chunk:
    """Whole records of a piece: lines of JSONL, a text file, or rows as an Arrow IPC stream.

    `first_line` of the piece, from 1. `end` and `next_line` say where the piece goes on behind the chunk: in
    bytes of its uncompressed file, in rows, or in files.
    """

    path: str
    format: str
    first_line: int
    data: bytes
    end: int
    next_line: int


@dataclass(frozen=True)
class BadLine:
    """A record that gives no document, and why. `data` is the line itself, or JSON that names the record."""

    path: str
    line: int
    reason: str
    data: bytes

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}"


@dataclass
class ParsedRecords:
    """What a chunk's records hold: per document one text for each key, bad records, blank lines."""

    documents: list[tuple[str, ...]] = field(default_factory=list)
    bad: list[BadLine] = field(default_factory=list)
    blank: int = 0


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


def open_parquet(path: Path) -> Any:
    """A pyarrow ParquetFile. Raises DataError."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise DataError(f'{path}: needs pyarrow: pip install "megnorm[preprocess]"') from None
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (OSError, ValueError) as error:  # pyarrow's own errors are among these
        raise DataError(f"{path}: not a Parquet file ({one_line(error)})") from None


def read_piece(
    piece: Piece,
    keys: Sequence[str],
    chunk_bytes: int = CHUNK_BYTES,
    done: int = 0,
    next_line: int = 1,
    on_read: Callable[[int], None] = lambda position: None,
) -> Iterator[Chunk]:
    """A piece in chunks of about `chunk_bytes` uncompressed bytes.

    `done` and `next_line` are the `end` and `next_line` of the last chunk of an earlier reading. `on_read` is
    told how many bytes on disk were read. Raises DataError when the file can't be read.
    """
    reader = {"jsonl": _read_lines, "text": _read_text, "parquet": _read_parquet, "arrow": _read_arrow}
    try:
        yield from reader[piece.format](piece, keys, chunk_bytes, done, next_line, on_read)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise DataError(f"{piece.path}: cannot be read ({reason})") from None
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("zstandard", "pyarrow"):
            raise
        raise DataError(f"{piece.path}: cannot be read ({one_line(error)})") from None


def _read_lines(piece: Piece, keys, chunk_bytes: int, done: int, line: int, on_read) -> Iterator[Chunk]:
    path = Path(piece.path)
    with open(path, "rb") as raw:
        file = open_binary(path, raw)
        seekable = file is raw and raw.seekable()
        position = raw.tell if raw.seekable() else lambda: 0  # a pipe has none
        at = _go_to(file, done or _first_line(file, piece.start), seekable)
        stop = piece.stop
        while stop is None or at < stop:
            data = file.read(chunk_bytes if stop is None else min(chunk_bytes, stop - at))
            if not data:
                return
            data += file.readline()
            at += len(data)
            on_read(position() - piece.start)
            lines = count_lines(data)
            if at == len(data):
                data = data.removeprefix(codecs.BOM_UTF8)
            yield Chunk(piece.path, "jsonl", line, data, at, line + lines)
            line += lines


def _first_line(file: BinaryIO, start: int) -> int:
    """Where the first line begins that begins at `start` or later."""
    if start == 0:
        return 0
    file.seek(start - 1)
    return start - 1 + len(file.readline())


def _go_to(file: BinaryIO, position: int, seekable: bool) -> int:
    """Goes to a position of the uncompressed bytes."""
    if seekable:
        file.seek(position)
        return position
    left = position
    while left:
        skipped = len(file.read(min(left, CHUNK_BYTES)))
        if not skipped:
            raise EOFError("shorter than it was before the interruption")
        left -= skipped
    return position


def lines_before(piece: Piece) -> int:
    """Lines of a JSONL file before the first one of a piece."""
    with open(piece.path, "rb") as file:
        left, lines = _first_line(file, piece.start), 0
        file.seek(0)
        while left and (block := file.read(min(left, CHUNK_BYTES))):
            lines += block.count(b"\n")
            left -= len(block)
    return lines


def _read_text(piece: Piece, keys, chunk_bytes: int, done: int, line: int, on_read) -> Iterator[Chunk]:
    if tuple(keys) != ("text",):
        raise DataError(f"{piece.path}: a text file has no keys; leave --json-keys {' '.join(keys)} out")
    if done:
        return
    with open(piece.path, "rb") as raw:
        data = open_binary(Path(piece.path), raw).read()
    on_read(piece.disk_bytes)
    yield Chunk(piece.path, "text", line, data.removeprefix(codecs.BOM_UTF8), 1, line + 1)


def _read_parquet(piece: Piece, keys, chunk_bytes: int, done: int, line: int, on_read) -> Iterator[Chunk]:
    file = open_parquet(Path(piece.path))
    _check_columns(piece.path, file.schema_arrow, keys)
    groups = range(piece.start, file.num_row_groups if piece.stop is None else piece.stop)
    metadata = [file.metadata.row_group(group) for group in groups]
    rows = sum(group.num_rows for group in metadata)
    size = sum(
        group.column(c).total_uncompressed_size
        for group in metadata
        for c in range(group.num_columns)
        if group.column(c).path_in_schema in keys
    )
    step = max(1, min(1 << 16, rows * chunk_bytes // max(size, 1)))
    batches = file.iter_batches(step, list(groups), list(keys), use_threads=False)
    yield from _row_chunks(piece, batches, done, lambda end: on_read(piece.disk_bytes * end // max(rows, 1)))


def _read_arrow(piece: Piece, keys, chunk_bytes: int, done: int, line: int, on_read) -> Iterator[Chunk]:
    try:
        import pyarrow
    except ImportError:
        raise DataError(f'{piece.path}: needs pyarrow: pip install "megnorm[preprocess]"') from None
    with pyarrow.memory_map(piece.path) as source:
        if source.read(6) == b"ARROW1":
            file = pyarrow.ipc.open_file(source)
            batches = (file.get_batch(k) for k in range(file.num_record_batches))
        else:
            source.seek(0)
            file = batches = pyarrow.ipc.open_stream(source)
        _check_columns(piece.path, file.schema, keys)
        small = (
            batch.select(list(keys)).slice(a, step)
            for batch in batches
            for step in [max(1, batch.num_rows * chunk_bytes // max(batch.select(list(keys)).nbytes, 1))]
            for a in range(0, batch.num_rows, step)
        )
        yield from _row_chunks(piece, small, done, lambda end: on_read(min(source.tell(), piece.disk_bytes)))


def _row_chunks(piece: Piece, batches, done: int, on_rows: Callable[[int], None]) -> Iterator[Chunk]:
    import pyarrow

    end = 0
    for batch in batches:
        start, end = end, end + batch.num_rows
        if end <= done:
            continue
        sink = pyarrow.BufferOutputStream()
        with pyarrow.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        on_rows(end)
        yield Chunk(piece.path, "arrow", start + 1, sink.getvalue().to_pybytes(), end, end + 1)


def _check_columns(path: str, schema: Any, keys: Sequence[str]) -> None:
    import pyarrow.types as types

    for key in keys:
        if key not in schema.names:
            raise DataError(f'{path}: no column "{key}", there are: {", ".join(schema.names[:10])}')
        kind = schema.field(key).type
        kind = kind.value_type if types.is_dictionary(kind) else kind
        if not any(
            f(kind) for f in (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
        ):
            raise DataError(f'{path}: column "{key}" is {kind}, must be a string')


def count_lines(data: bytes) -> int:
    """Lines in a chunk, an unfinished last one included."""
    return data.count(b"\n") + (not data.endswith(b"\n"))


def parse_chunk(chunk: Chunk, keys: Sequence[str]) -> ParsedRecords:
    """The texts of a chunk's records under the keys. Blank lines are no documents."""
    parse = {"jsonl": _parse_lines, "text": _parse_text, "arrow": _parse_rows}
    return parse[chunk.format](chunk, keys)


def _parse_lines(chunk: Chunk, keys: Sequence[str]) -> ParsedRecords:
    out = ParsedRecords()
    # Split at \n only: str.splitlines would also cut at the separators that JSON strings may hold.
    for number, line in enumerate(chunk.data.removesuffix(b"\n").split(b"\n"), chunk.first_line):
        if not line or line.isspace():
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


def _parse_text(chunk: Chunk, keys: Sequence[str]) -> ParsedRecords:
    try:
        return ParsedRecords([(chunk.data.decode(),)])
    except UnicodeDecodeError as error:
        return ParsedRecords(bad=[_bad_record(chunk, chunk.first_line, f"not UTF-8 (byte {error.start})")])


def _parse_rows(chunk: Chunk, keys: Sequence[str]) -> ParsedRecords:
    import pyarrow

    table = pyarrow.ipc.open_stream(chunk.data).read_all()
    columns = [table.column(key).cast(pyarrow.large_binary()).to_pylist() for key in keys]
    out = ParsedRecords()
    for number, values in enumerate(zip(*columns, strict=True), chunk.first_line):
        try:
            out.documents.append(tuple(value.decode() for value in values))
        except AttributeError:
            missing = keys[values.index(None)]
            out.bad.append(_bad_record(chunk, number, f'"{missing}" is null, must be a string'))
        except UnicodeDecodeError:
            out.bad.append(_bad_record(chunk, number, "not UTF-8"))
    return out


def _bad_record(chunk: Chunk, number: int, reason: str) -> BadLine:
    data = orjson.dumps({"file": chunk.path, "record": number, "reason": reason})
    return BadLine(chunk.path, number, reason, data)
