"""Tokenizers behind one small protocol. Their libraries are imported when one is loaded."""

from __future__ import annotations

import base64
import contextlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megnorm.data.errors import DataError

END_OF_TEXT = "<|endoftext|>"


class Tokenizer(Protocol):
    """Text to ids and back. Adds no token of its own: no beginning, no end, no space in front.

    `type` is Megatron's name of the kind; `path` the model file or None; ids are 0 .. vocab_size - 1;
    `eod` is the end-of-document id or None. No text, whatever is written in it, encodes to `eod`.
    """

    type: str
    path: Path | None
    vocab_size: int
    eod: int | None

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; control tokens such as the end of a document give nothing."""
        ...


def encode_arrays(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """(ids of all texts one behind the other, i32 lengths) by `tokenizer.encode`."""
    ids = tokenizer.encode(texts)
    lengths = np.fromiter(map(len, ids), np.int32, len(ids))
    total = int(lengths.sum(dtype=np.int64))
    return np.fromiter(itertools.chain.from_iterable(ids), np.int32, total), lengths


def _batches(texts: Sequence[str], chars: int) -> Iterator[list[str]]:
    """The texts in order, in lists that end with the text that brings them to `chars` characters."""
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= chars:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def release_memory() -> None:
    """Gives freed memory back to the system, where the C library can."""
    import ctypes

    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


class ByteTokenizer:
    """UTF-8 bytes; 256 is the end of a document."""

    type = "ByteTokenizer"
    path = None
    vocab_size = 257
    eod = 256

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class SentencePieceTokenizer:
    """A SentencePiece model; its </s> is the end of a document. Control pieces never arise from text."""

    type = "SentencePieceTokenizer"

    def __init__(self, path: str | Path) -> None:
        from sentencepiece import SentencePieceProcessor

        self.path = Path(path)
        try:
            self._model = SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError) as error:
            raise DataError(f"{path}: not a SentencePiece model ({one_line(error)})") from None
        self.vocab_size = self._model.get_piece_size()
        eos = self._model.eos_id()
        self.eod = eos if eos >= 0 else None

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return self._model.encode(list(texts), add_bos=False, add_eos=False, num_threads=1)

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(i) for i in ids])


class HFTokenizer:
    """A `tokenizer.json` of Hugging Face's tokenizers, or a folder with one."""

    type = "HFTokenizer"
    _ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
    _BATCH_CHARS = 1 << 17  # the library keeps about 300 bytes a token until a batch is done

    def __init__(self, path: str | Path) -> None:
        try:
            from tokenizers import Tokenizer as Model
        except ImportError:
            raise DataError('HFTokenizer needs tokenizers: pip install "megnorm[preprocess]"') from None

        self.path = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        if not self.path.is_file():
            raise DataError(f"{self.path}: no such file")
        try:
            self._model = Model.from_file(str(self.path))
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{self.path}: not a tokenizer.json ({one_line(error)})") from None
        self._model.no_padding()
        self._model.no_truncation()
        self._model.encode_special_tokens = True  # "<|endoftext|>" in a text is text
        vocabulary = self._model.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self._end = next((piece for piece in self._ENDS if piece in vocabulary), None)
        self.eod = vocabulary[self._end] if self._end else None

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        out = []
        for batch in _batches(texts, self._BATCH_CHARS):
            out += [item.ids for item in self._model.encode_batch_fast(batch, add_special_tokens=False)]
            if sum(map(len, batch)) > 2 * self._BATCH_CHARS:  # a long text's memory would stay with the allocator
                release_memory()
        for i, ids in enumerate(out):
            # An added token that isn't marked as special is still matched in text.
            if self.eod in ids:
                out[i] = self._encode_cut(texts[i])
        return out

    def _encode_cut(self, text: str) -> list[int]:
        """Ids of a text that spells the end token, cut in the middle of each such place."""
        assert self._end is not None
        half = len(self._end) // 2
        parts = text.split(self._end)
        parts = [
            (self._end[half:] if i else "") + part + (self._end[:half] if i + 1 < len(parts) else "")
            for i, part in enumerate(parts)
        ]
        encoded = self._model.encode_batch_fast(parts, add_special_tokens=False)
        return [i for item in encoded for i in item.ids if i != self.eod]

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(i) for i in ids if i != self.eod], skip_special_tokens=True)


class TikTokenizer:
    """A tiktoken rank file (a line a token: base64 of its bytes, its id). The file carries neither the
    pattern that cuts texts into words nor the special tokens, so its name must be a published encoding's."""

    type = "TikTokenizer"
    # github.com/openai/tiktoken, tiktoken_ext/openai_public.py: pattern, end of text, vocabulary.
    _ENCODINGS = {
        "r50k_base": (
            r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s""",
            50256,
            50257,
        ),
        "cl100k_base": (
            r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"""
            r"""|\s++$|\s*[\r\n]|\s+(?!\S)|\s""",
            100257,
            100277,
        ),
        "o200k_base": (
            r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"""
            r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
            r"""|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"""
            r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
            r"""|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
            199999,
            200019,
        ),
    }

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        name = self.path.name.removesuffix(".tiktoken")
        if name not in self._ENCODINGS:
            raise DataError(
                f"{path}: the name of a rank file must say its encoding, one of "
                f"{', '.join(f'{known}.tiktoken' for known in self._ENCODINGS)}; for another one make a "
                f"tokenizer.json and take HFTokenizer"
            )
        pattern, self.eod, self.vocab_size = self._ENCODINGS[name]
        self._model = build_tiktoken(name, pattern, self._read_ranks())

    def _read_ranks(self) -> dict[bytes, int]:
        ranks = {}
        for number, line in enumerate(self.path.read_bytes().splitlines(), 1):
            if not line:
                continue
            try:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
            except ValueError:
                raise DataError(f"{self.path}:{number}: not a tiktoken rank (base64, number)") from None
        if not all(0 <= rank < self.eod for rank in ranks.values()):
            raise DataError(f"{self.path}: ranks must be 0 to {self.eod - 1}")
        if not all(bytes([byte]) in ranks for byte in range(256)):
            raise DataError(f"{self.path}: some single byte has no rank; the file is cut or foreign")
        return ranks

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._model.encode_ordinary(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(i) for i in ids if i < self.eod])


def build_tiktoken(name: str, pattern: str, ranks: dict[bytes, int]) -> Any:
    """A tiktoken Encoding for plain text. Raises DataError where tiktoken is missing or refuses."""
    try:
        import tiktoken
    except ImportError:
        raise DataError('tiktoken is needed: pip install "megnorm[preprocess]"') from None
    # Without any special token tiktoken looks for the empty one at every letter, which costs a third of its time.
    unused = {"\uffff<|unused|>\uffff": max(ranks.values(), default=0) + 1}
    try:
        return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=unused)
    except Exception as error:  # the library raises ValueError, PanicException, ...
        raise DataError(f"tiktoken: {one_line(error)}") from None


_KINDS = {kind.type: kind for kind in (SentencePieceTokenizer, HFTokenizer, TikTokenizer)}
TOKENIZER_TYPES = (*_KINDS, "ByteTokenizer")


def load_tokenizer(type: str, path: str | Path | None = None) -> Tokenizer:
    """The tokenizer of a kind (TOKENIZER_TYPES) from its model file; ByteTokenizer has none."""
    if type not in TOKENIZER_TYPES:
        raise DataError(f"tokenizer type {type!r}, must be one of {', '.join(TOKENIZER_TYPES)}")
    if type == "ByteTokenizer":
        return ByteTokenizer()
    if path is None:
        raise DataError(f"{type} needs a model file (--tokenizer-model)")
    if not Path(path).exists():
        raise DataError(f"{path}: no such tokenizer model")
    return _KINDS[type](path)


def one_line(error: BaseException) -> str:
    """An error of a library in at most 200 characters."""
    return " ".join(str(error).split())[:200]
