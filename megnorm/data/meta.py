"""The sidecar `<prefix>.meta.json`: where a dataset comes from and what it holds."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megnorm.data.errors import DataError

META_SUFFIX = ".meta.json"
VERSION = 1


@dataclass(frozen=True)
class TokenizerMeta:
    """Identity of a tokenizer. `path` is relative to the sidecar's folder, or absolute, or None (byte)."""

    type: str
    path: str | None
    sha256: str | None
    vocab_size: int
    eod_id: int | None


@dataclass(frozen=True)
class DatasetMeta:
    """What is known of a dataset beside its tokens.

    `tokens` counts the end-of-document tokens, `eod_tokens` only these; `text_bytes` is the UTF-8 size of the
    texts. Bits per byte = loss / ln 2 * tokens / text_bytes. `idx_sha256` may be "", for not known.
    """

    tokenizer: TokenizerMeta
    documents: int
    skipped: int
    tokens: int
    eod_tokens: int
    text_bytes: int
    dtype: str
    bin_sha256: str
    idx_sha256: str = ""
    sources: list[dict[str, Any]] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    version: int = VERSION

    def to_json(self) -> bytes:
        """The sidecar's content."""
        return (json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n").encode()

    def tokenizer_path(self, prefix: str | Path) -> Path | None:
        """Where the tokenizer's file is, for the dataset `prefix`; None for the byte tokenizer."""
        if self.tokenizer.path is None:
            return None
        return Path(os.path.normpath(meta_path(prefix).parent / self.tokenizer.path))


def file_sha256(path: str | Path) -> str:
    """Hex digest of a file."""
    sha = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            sha.update(block)
    return sha.hexdigest()


def meta_path(prefix: str | Path) -> Path:
    """`<prefix>.meta.json`."""
    return Path(f"{prefix}{META_SUFFIX}")


def relative_to_sidecar(path: str | Path, prefix: str | Path) -> str:
    """`path` as the sidecar of `prefix` keeps it: relative when both share a folder above, else absolute.

    Relative paths survive that the folder is moved or seen under another name from another machine.
    """
    file, folder = os.path.abspath(path), os.path.abspath(meta_path(prefix).parent)
    try:
        shared = os.path.commonpath([file, folder])
    except ValueError:  # another drive
        return file
    return file if shared == os.path.dirname(shared) else os.path.relpath(file, folder)


_NUMBERS = ("documents", "skipped", "tokens", "eod_tokens", "text_bytes")


def read_meta(prefix: str | Path) -> DatasetMeta | None:
    """The sidecar of a dataset, or None where there is none. Raises DataError when it is damaged."""
    path = meta_path(prefix)
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error}); run the preprocessing again") from None
    try:
        if raw["version"] != VERSION:
            raise DataError(f"{path}: version {raw['version']}, only {VERSION} is known")
        meta = DatasetMeta(tokenizer=TokenizerMeta(**raw.pop("tokenizer")), **raw)
        numbers = [getattr(meta, name) for name in _NUMBERS] + [meta.tokenizer.vocab_size]
        if not all(isinstance(number, int) and number >= 0 for number in numbers):
            raise TypeError("a count is not a number >= 0")
    except (KeyError, TypeError) as error:
        raise DataError(f"{path}: not a dataset's sidecar ({error}); run the preprocessing again") from None
    return meta
