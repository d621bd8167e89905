"""Megatron's indexed token files: `<prefix>.bin` (raw tokens) and `<prefix>.idx` (where they are).

Layout of `.idx`, little-endian, N sequences and D documents:

    9 bytes            b"MMIDIDX\\0\\0"
    u64                version, 1
    u8                 dtype code of the tokens (DTYPES)
    u64                N
    u64                D + 1
    N x i32            lengths of the sequences, in tokens
    N x i64            where each sequence starts in .bin, in bytes
    (D + 1) x i64      document boundaries, in sequences; the first is 0, the last is N
    N x i8             modes; optional, follows from the size of the file

An empty document repeats a boundary and has no sequence. Format: Megatron-LM, megatron/core/datasets/
indexed_dataset.py.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from megnorm.data.errors import DataError
from megnorm.data.files import sync_file, sync_folder
from megnorm.data.lengths import document_lengths
from megnorm.data.meta import META_SUFFIX, file_sha256, read_meta

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_HEADER = struct.Struct("<9sQBQQ")
# An index up to this size is compared with the digest in its sidecar whenever it is opened.
_DIGEST_BYTES = 64 << 20
# Arrays of a corpus are walked in blocks, so that 10^8 documents don't need gigabytes at once.
_BLOCK = 1 << 20


def best_dtype(vocab_size: int) -> np.dtype:
    """The dtype Megatron takes for a vocabulary: u16 below 65500 entries, else i32."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def idx_path(prefix: str | Path) -> Path:
    """`<prefix>.idx`."""
    return Path(f"{prefix}.idx")


def bin_path(prefix: str | Path) -> Path:
    """`<prefix>.bin`."""
    return Path(f"{prefix}.bin")


def _dtype_code(dtype: np.dtype) -> int:
    for code, name in DTYPES.items():
        if np.dtype(name) == dtype:
            return code
    raise DataError(f"dtype {dtype} has no code in the .idx format; take one of {', '.join(DTYPES.values())}")


def _file_size(path: Path, prefix: str | Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        near = sorted(p.name[:-4] for p in path.parent.glob(f"{Path(prefix).name}*.idx"))[:3]
        hint = f"; there is {', '.join(near)} in that folder" if near and path.suffix == ".idx" else ""
        raise DataError(f"{path}: cannot be read ({reason}){hint}") from None


class IndexedDataset:
    """Read-only, memory-mapped view of `<prefix>.bin` and `<prefix>.idx`.

    Attributes: `lengths` i32 [N] tokens of each sequence; `offsets` i64 [N] byte offset of each sequence in
    .bin; `documents` i64 [D + 1] boundaries in sequences; `tokens` all of them, of `dtype`; `has_modes`
    whether the index ends with the modes of the sequences, which nothing here reads.

    Nothing in the files is believed before it is checked: sizes against the header before anything is
    mapped, then lengths, offsets and boundaries. Raises DataError, naming the file and the rule.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        self._idx, self._bin = idx_path(prefix), bin_path(prefix)
        idx_size, bin_size = _file_size(self._idx, prefix), _file_size(self._bin, prefix)
        self.dtype, n, boundaries = self._read_header(idx_size)
        at = _HEADER.size
        self.lengths = self._map(self._idx, at, n, "<i4")
        self.offsets = self._map(self._idx, at + 4 * n, n, "<i8")
        self.documents = self._map(self._idx, at + 12 * n, boundaries, "<i8")
        tokens = self._check_sequences()
        self._check_boundaries()
        if bin_size != tokens * self.dtype.itemsize:
            raise DataError(
                f"{self._bin}: {bin_size} bytes, but {self._idx.name} describes {tokens} tokens of "
                f"{self.dtype.itemsize} bytes = {tokens * self.dtype.itemsize}; the file is cut or foreign"
            )
        self.tokens = self._map(self._bin, 0, tokens, self.dtype)
        if idx_size <= _DIGEST_BYTES:
            self.check_digest()

    def check_digest(self) -> None:
        """Raises DataError when the index isn't the one that the sidecar, where there is one, describes.

        The rules above leave room for damage that gives other documents, such as a boundary that moved.
        """
        meta = read_meta(self.prefix)
        if meta and meta.idx_sha256 and file_sha256(self._idx) != meta.idx_sha256:
            raise DataError(
                f"{self._idx}: isn't the index that {self.prefix}{META_SUFFIX} describes (other sha256): it "
                f"is damaged, or the sidecar is of another dataset and must go"
            )

    def _read_header(self, size: int) -> tuple[np.dtype, int, int]:
        if size < _HEADER.size:
            raise DataError(f"{self._idx}: {size} bytes, an index has at least {_HEADER.size}; file is cut")
        with open(self._idx, "rb") as file:
            magic, version, code, n, boundaries = _HEADER.unpack(file.read(_HEADER.size))
        if magic != MAGIC:
            raise DataError(f"{self._idx}: starts with {magic!r}, not {MAGIC!r}; not a Megatron index")
        if version != VERSION:
            raise DataError(f"{self._idx}: version {version}, only {VERSION} is known")
        if code not in DTYPES:
            raise DataError(f"{self._idx}: dtype code {code}, must be 1 to {max(DTYPES)}")
        if boundaries < 1:
            raise DataError(f"{self._idx}: no document boundaries, must be at least one")
        plain = _HEADER.size + 12 * n + 8 * boundaries
        self.has_modes = n > 0 and size == plain + n
        if size not in (plain, plain + n):
            raise DataError(
                f"{self._idx}: {size} bytes, but its header ({n} sequences, {boundaries} boundaries) asks "
                f"for {plain} or, with modes, {plain + n}; the file is cut or damaged"
            )
        return np.dtype(DTYPES[code]), n, boundaries

    @staticmethod
    def _map(path: Path, offset: int, count: int, dtype: str | np.dtype) -> np.ndarray:
        if count == 0:  # mmap refuses an empty range
            return np.empty(0, dtype)
        return np.memmap(path, dtype, "r", offset, (count,)).view(np.ndarray)

    def _check_sequences(self) -> int:
        """Lengths are positive or 0 and sequences lie one behind the other; returns the tokens in all."""
        total = 0
        for a in range(0, len(self.lengths), _BLOCK):
            lengths = self.lengths[a : a + _BLOCK].astype(np.int64)
            if lengths.min() < 0:
                k = a + int(np.argmax(lengths < 0))
                raise DataError(f"{self._idx}: sequence {k} has length {self.lengths[k]}, must be >= 0")
            ends = total + np.cumsum(lengths)
            wrong = self.offsets[a : a + _BLOCK] != (ends - lengths) * self.dtype.itemsize
            if wrong.any():
                k = a + int(np.argmax(wrong))
                raise DataError(
                    f"{self._idx}: sequence {k} starts at byte {self.offsets[k]}, but must start where "
                    f"sequence {k - 1} ends; the offsets are damaged"
                    if k
                    else f"{self._idx}: sequence 0 starts at byte {self.offsets[0]}, must be 0"
                )
            total = int(ends[-1])
        return total

    def _check_boundaries(self) -> None:
        first, last, n = int(self.documents[0]), int(self.documents[-1]), len(self.lengths)
        if first != 0 or last != n:
            raise DataError(
                f"{self._idx}: document boundaries run from {first} to {last}, must run from 0 to {n}"
            )
        for a in range(0, len(self.documents) - 1, _BLOCK):
            steps = np.diff(self.documents[a : a + _BLOCK + 1])
            if steps.min() < 0:
                k = a + int(np.argmax(steps < 0))
                raise DataError(
                    f"{self._idx}: document boundary {k + 1} ({self.documents[k + 1]}) is below boundary "
                    f"{k} ({self.documents[k]}), must not fall"
                )

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    @property
    def num_documents(self) -> int:
        """Number of documents, empty ones included."""
        return len(self.documents) - 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all sequences."""
        return len(self.tokens)

    def largest_id(self, tokens: int = 1 << 26) -> int:
        """The largest id among the first `tokens` tokens; -1 without tokens."""
        head = range(0, min(tokens, len(self.tokens)), _BLOCK)
        return max((int(self.tokens[a : min(a + _BLOCK, tokens)].max()) for a in head), default=-1)

    def token_blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """(number of its first token, tokens) of blocks of all tokens."""
        for a in range(0, len(self.tokens), _BLOCK):
            yield a, self.tokens[a : a + _BLOCK]

    def read(self, sequence: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens [offset, offset + length) of one sequence, to its end without `length`; a read-only view."""
        return self._read_run(sequence, sequence + 1, offset, length)

    def read_document(self, document: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens [offset, offset + length) of one document over all of its sequences; a read-only view."""
        if not 0 <= document < self.num_documents:
            raise IndexError(f"document {document} of {self.num_documents} in {self.prefix}")
        first, last = int(self.documents[document]), int(self.documents[document + 1])
        if first == last:
            if offset or length:
                raise IndexError(f"document {document} of {self.prefix} is empty")
            return self.tokens[:0]
        return self._read_run(first, last, offset, length)

    def _read_run(self, first: int, last: int, offset: int, length: int | None) -> np.ndarray:
        if not 0 <= first < last <= len(self.lengths):
            raise IndexError(f"sequence {first} of {len(self.lengths)} in {self.prefix}")
        start = int(self.offsets[first]) // self.dtype.itemsize
        end = int(self.offsets[last - 1]) // self.dtype.itemsize + int(self.lengths[last - 1])
        stop = end if length is None else start + offset + length
        if not (0 <= offset and start + offset <= stop <= end):
            raise IndexError(f"tokens {offset} to {stop - start} of {end - start}, sequence {first}")
        return self.tokens[start + offset : stop]

    def document_lengths(self, first: int = 0, last: int | None = None) -> np.ndarray:
        """Tokens of the documents [first, last): i32 or i64 [last - first]."""
        return document_lengths(self.lengths, self.documents, first, last)


class IndexedWriter:
    """Writes `<prefix>.bin` and `.idx`, one sequence a document. A context manager.

    Everything goes to temporary files beside the target. On leaving without an exception they are synced and
    renamed: `.bin` first, then sidecars, `.idx` last, so that a dataset with an `.idx` is complete. On an
    exception nothing appears, and nothing is left but what was there before; `resumable` keeps the temporary
    files, under names that the next run finds, unless the exception is a DataError.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype | str | type, resumable: bool = False) -> None:
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._code = _dtype_code(self.dtype)
        self._mark = "part" if resumable else f"{os.getpid()}.tmp"
        self._resumable = resumable
        self._sha = hashlib.sha256()
        self._idx_sha256: str | None = None
        self._sidecars: dict[str, bytes] = {}
        self.num_documents, self.num_tokens = 0, 0
        Path(prefix).parent.mkdir(parents=True, exist_ok=True)
        self._bin = self._open(".bin")
        # Lengths are spooled to disk: the memory must not grow with the corpus.
        self._lengths = self._open(".lengths")

    def _temporary(self, suffix: str) -> Path:
        return Path(f"{self.prefix}{suffix}.{self._mark}")

    def _open(self, suffix: str) -> BinaryIO:
        path = self._temporary(suffix)
        return open(path, "rb+" if self._resumable and path.exists() else "wb+")

    def restore(self, documents: int, tokens: int) -> bool:
        """Goes back to the state after so many documents of an interrupted run; False if it isn't there."""
        sizes = (tokens * self.dtype.itemsize, documents * 4)
        files = (self._bin, self._lengths)
        if any(os.fstat(f.fileno()).st_size < size for f, size in zip(files, sizes, strict=True)):
            return False
        self._sha = hashlib.sha256()
        for file, size in zip(files, sizes, strict=True):
            file.truncate(size)
            file.seek(0)
            while file is self._bin and (block := file.read(_BLOCK)):
                self._sha.update(block)
            file.seek(size)
        self.num_documents, self.num_tokens = documents, tokens
        return True

    def sync(self) -> None:
        """Makes durable what was added so far."""
        sync_file(self._bin)
        sync_file(self._lengths)

    def add_document(self, ids: np.ndarray | list[int]) -> None:
        """Appends one document; an empty one is a document without a sequence."""
        ids = np.asarray(ids, np.int64) if len(ids) else np.empty(0, np.int64)
        if len(ids) and self.dtype.kind in "iu":
            limits = np.iinfo(self.dtype)
            for value in (int(ids.min()), int(ids.max())):
                if not limits.min <= value <= limits.max:
                    raise DataError(f"token id {value} doesn't fit {self.dtype} in {self.prefix}.bin")
        self.add_documents(ids.astype(self.dtype), np.array([len(ids)]))

    def add_documents(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Appends many documents: `tokens` of the writer's dtype, one after the other, and their lengths."""
        lengths = np.asarray(lengths, np.int64)
        assert tokens.dtype == self.dtype and int(lengths.sum()) == len(tokens)
        if len(lengths) and lengths.max() > np.iinfo(np.int32).max:
            raise DataError(f"a document of {lengths.max()} tokens: the format allows {2**31 - 1}")
        data = np.ascontiguousarray(tokens).data.cast("B") if len(tokens) else b""
        self._bin.write(data)
        self._sha.update(data)
        self._lengths.write(lengths.astype("<i4").tobytes())
        self.num_documents += len(lengths)
        self.num_tokens += len(tokens)

    def add_sidecar(self, suffix: str, content: bytes) -> None:
        """Publishes `<prefix><suffix>` together with the dataset."""
        self._sidecars[suffix] = content

    @property
    def bin_sha256(self) -> str:
        """Hex digest of the tokens written so far."""
        return self._sha.hexdigest()

    def length_blocks(self) -> Iterator[np.ndarray]:
        """Tokens of the documents written so far, i32, in blocks."""
        self._lengths.flush()
        for a in range(0, self.num_documents, _BLOCK):
            count = min(_BLOCK, self.num_documents - a)
            yield np.fromfile(self._lengths.name, "<i4", count, offset=4 * a)

    def seal(self) -> str:
        """Ends the writing; hex digest of the index, for a sidecar."""
        if self._idx_sha256 is None:
            with open(self._temporary(".idx"), "wb") as file:
                self._write_index(file)
                sync_file(file)
            self._idx_sha256 = file_sha256(self._temporary(".idx"))
        return self._idx_sha256

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        kept = self._resumable and kind is not None and not issubclass(kind, DataError)
        try:
            if kind is None:
                self._publish()
        except BaseException:
            kept = self._resumable
            raise
        finally:
            self._bin.close()
            self._lengths.close()
            for suffix in (
                (".idx", *self._sidecars) if kept else (".bin", ".idx", ".lengths", *self._sidecars)
            ):
                self._temporary(suffix).unlink(missing_ok=True)

    def _publish(self) -> None:
        sync_file(self._bin)
        self.seal()
        for suffix, content in self._sidecars.items():
            with open(self._temporary(suffix), "wb") as file:
                file.write(content)
                sync_file(file)
        # An old index must not stand beside a new .bin, not even for a moment.
        for suffix in (".idx", META_SUFFIX):
            Path(self.prefix + suffix).unlink(missing_ok=True)
        for suffix in (".bin", *self._sidecars, ".idx"):
            os.replace(self._temporary(suffix), self.prefix + suffix)
        sync_folder(Path(self.prefix).parent)

    def _write_index(self, file: BinaryIO) -> None:
        sequences = sum(int(np.count_nonzero(block)) for block in self.length_blocks())
        file.write(_HEADER.pack(MAGIC, VERSION, self._code, sequences, self.num_documents + 1))
        for block in self.length_blocks():
            file.write(block[block > 0].tobytes())
        start = 0
        for block in self.length_blocks():
            lengths = block[block > 0].astype("<i8") * self.dtype.itemsize
            ends = start + np.cumsum(lengths)
            file.write((ends - lengths).astype("<i8").tobytes())
            start = int(ends[-1]) if len(ends) else start
        file.write(np.zeros(1, "<i8").tobytes())
        seen = 0
        for block in self.length_blocks():
            bounds = seen + np.cumsum(block > 0, dtype=np.int64)
            file.write(bounds.astype("<i8").tobytes())
            seen = int(bounds[-1])
