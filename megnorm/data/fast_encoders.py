"""Faster encoders that stand in for a tokenizer, each only after it gave the same ids as that.

gigatoken runs byte-level BPE (tokenizer.json) and SentencePiece BPE models with byte fallback, tiktoken runs
byte-level BPE. Neither reads files here: gigatoken's own JSONL reader stops silently at the first bad record.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megnorm.data.errors import DataError
from megnorm.data.tokenizers import Tokenizer, build_tiktoken, encode_arrays, one_line

BACKENDS = ("auto", "native", "gigatoken", "tiktoken")
# gigatoken remembers every word that it saw; a fresh object is made when the process grew by so much.
_CACHE_BYTES = 20 << 20
# Without a way to ask for the process's memory: after so much text (10 bytes a byte at worst, measured).
_CACHE_TEXT = 4 << 20
_GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# What a BPE is most likely to do differently: runs of spaces, line ends, marks, digits, broken words, bytes.
TRICKY = (
    "",
    " ",
    "  \n\n \t x",
    "a\r\nb\rc\u2028d\u0085e",
    "it's we'll I'VE they'RE 'tis",
    "12345678 1,234.5 \u0661\u0662\u0663 \u00bd\u00b2",
    "e\u0301 \u00e9 \uac00\u1100\u1161 \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea",
    "\u2581word \u2581 <0x0A> <s></s><unk> \ufeff\u200b\u00a0\u3000x",
    "<|endoftext|> <|endoftext|><|endoftext|> x<|end",
    "\x00\x01\x7f\x80\uffff\U0010ffff",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" * 20,
    "def f(x):\n\treturn {'a': [1, 2.5e-3]}  # \u4f60\u597d\uff0c\u4e16\u754c\n" + " " * 83 + "=" * 70,
    "\u0627\u0644\u0633\u0644\u0627\u0645 \u0928\u092e\u0938\u094d\u0924\u0947"
    " \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \u1e9e\u0130",
)


class Encoder(Protocol):
    """Texts to ids: all texts' ids one behind the other, of an integer dtype, and i32 lengths."""

    backend: str

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]: ...


class NativeEncoder:
    """The tokenizer itself."""

    backend = "native"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        return encode_arrays(self._tokenizer, texts)


class _TextwiseEncoder:
    """An encoder that gives an array for each text."""

    def _encode_one(self, text: str) -> np.ndarray:
        raise NotImplementedError

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        parts = [self._encode_one(text) for text in texts]
        lengths = np.fromiter(map(len, parts), np.int32, len(parts))
        return np.concatenate(parts) if parts else np.empty(0, np.uint32), lengths


class GigatokenEncoder(_TextwiseEncoder):
    """gigatoken over a tokenizer.json or a SentencePiece model. Special tokens spelt in a text stay text."""

    backend = "gigatoken"

    def __init__(self, tokenizer: Tokenizer) -> None:
        try:
            from gigatoken.gigatoken_rs import load_hf_json
        except ImportError:
            raise DataError('gigatoken is needed: pip install "megnorm[preprocess]"') from None
        self._load, self._json = load_hf_json, _gigatoken_json(tokenizer)
        self._renew()

    def _renew(self) -> None:
        self._model = None
        try:
            self._model = self._load(self._json)
        except Exception as error:
            raise DataError(f"gigatoken can't run this tokenizer ({one_line(error)})") from None
        self._fresh, self._text = _resident_bytes(), 0

    def _encode_one(self, text: str) -> np.ndarray:
        return self._model.encode(text)

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        ids, lengths = super().encode(texts)
        self._text += sum(map(len, texts))
        now = _resident_bytes()
        if now - self._fresh > _CACHE_BYTES if now else self._text > _CACHE_TEXT:
            self._renew()
        return ids, lengths


class TiktokenEncoder(_TextwiseEncoder):
    """tiktoken over a byte-level BPE tokenizer.json."""

    backend = "tiktoken"

    def __init__(self, tokenizer: Tokenizer) -> None:
        config = _read_json(tokenizer, "tiktoken")
        model = config.get("model", {})
        pattern = _tiktoken_pattern(config)
        if model.get("type") != "BPE" or pattern is None or config.get("normalizer"):
            raise DataError(f"{tokenizer.path}: tiktoken runs byte-level BPE without a normalizer only")
        special = {token["content"] for token in config.get("added_tokens", [])}
        letters = _byte_letters()
        try:
            ranks = {
                bytes(letters[letter] for letter in piece): rank
                for piece, rank in model["vocab"].items()
                if piece not in special
            }
        except KeyError:
            raise DataError(
                f"{tokenizer.path}: its pieces aren't byte-level, so tiktoken can't run it"
            ) from None
        self._model = build_tiktoken("megnorm", pattern, ranks)

    def _encode_one(self, text: str) -> np.ndarray:
        return self._model.encode_to_numpy(text, disallowed_special=())


_ENCODERS = {"native": NativeEncoder, "gigatoken": GigatokenEncoder, "tiktoken": TiktokenEncoder}


def make_encoder(tokenizer: Tokenizer, backend: str) -> Encoder:
    """The encoder of a settled backend (not "auto"), unchecked."""
    return _ENCODERS[backend](tokenizer)


def settle_encoder(tokenizer: Tokenizer, backend: str, sample: Iterable[str]) -> tuple[Encoder, str | None]:
    """(encoder to use, why not a faster one) after comparing ids on TRICKY and on `sample`.

    "auto" falls back to "native"; a backend asked for by name that can't be used raises DataError.
    """
    if backend not in BACKENDS:
        raise DataError(f"--tokenizer-backend {backend}, must be one of {', '.join(BACKENDS)}")
    if backend == "native" or (backend == "auto" and tokenizer.path is None):
        return NativeEncoder(tokenizer), None
    try:
        encoder = make_encoder(tokenizer, "gigatoken" if backend == "auto" else backend)
        check_parity(tokenizer, encoder, (*TRICKY, *sample))
    except DataError as error:
        if backend == "auto":
            return NativeEncoder(tokenizer), str(error)
        raise
    return encoder, None


def check_parity(tokenizer: Tokenizer, encoder: Encoder, texts: Sequence[str]) -> None:
    """Raises DataError when an encoder gives other ids than its tokenizer for one of the texts."""
    ids, lengths = encoder.encode(texts)
    at = 0
    for text, length, right in zip(texts, lengths.tolist(), tokenizer.encode(texts), strict=True):
        if ids[at : at + length].tolist() != right:
            raise DataError(
                f"{encoder.backend} has other ids than {tokenizer.type} {tokenizer.path} for {text[:60]!r}: "
                f"take --tokenizer-backend native"
            )
        at += length


def _read_json(tokenizer: Tokenizer, backend: str) -> dict[str, Any]:
    if tokenizer.type != "HFTokenizer" or tokenizer.path is None:
        raise DataError(f"{tokenizer.type} can't be run by {backend}")
    return json.loads(Path(tokenizer.path).read_bytes())


def _gigatoken_json(tokenizer: Tokenizer) -> str:
    if tokenizer.type == "SentencePieceTokenizer" and tokenizer.path is not None:
        from gigatoken._load.sentencepiece import sentencepiece_to_tokenizer_json

        try:
            config = json.loads(sentencepiece_to_tokenizer_json(Path(tokenizer.path).read_bytes()))
        except ValueError as error:
            raise DataError(f"gigatoken can't run {tokenizer.path} ({one_line(error)})") from None
    else:
        config = _read_json(tokenizer, "gigatoken")
    config["added_tokens"] = [token for token in config.get("added_tokens", []) if not token.get("special")]
    return json.dumps(config)


def _tiktoken_pattern(config: dict[str, Any]) -> str | None:
    """The pattern that cuts a text into words, or None where the pre-tokenizer isn't byte-level."""
    before = config.get("pre_tokenizer") or {}
    steps = before.get("pretokenizers", [before])
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    if len(steps) == 1:
        return _GPT2_PATTERN if steps[0].get("use_regex", True) else None
    split = steps[0]
    alone = len(steps) == 2 and split.get("type") == "Split" and split.get("behavior") == "Isolated"
    if not alone or split.get("invert") or steps[1].get("use_regex", True):
        return None
    return split.get("pattern", {}).get("Regex")


def _byte_letters() -> dict[str, int]:
    """GPT-2's letters for bytes: printable ones stand for themselves, the others for 256 and following."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def _resident_bytes() -> int:
    """Memory of this process, 0 where the system doesn't say."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
