"""Training of BPE models that give every text back exactly: SentencePiece, and Hugging Face's byte-level."""

from __future__ import annotations

import io
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megnorm.data.command import ToolFailure
from megnorm.data.errors import DataError
from megnorm.data.inputs import expand_inputs, plan_pieces
from megnorm.data.readers import parse_chunk, read_piece
from megnorm.data.tokenizers import END_OF_TEXT, HFTokenizer, SentencePieceTokenizer, Tokenizer

# SentencePiece learns from "sentences"; pieces of several lines let it learn line ends too.
_PIECE_CHARS = 2000
_CHECKED = 500
# SentencePiece writes spaces as U+2581, so a text's own U+2581 comes back as a space.
_SPACE_MARK = "\u2581"


@dataclass(frozen=True)
class TrainingReport:
    """What was learnt from: characters read and used; bytes a token and round trips on a sample."""

    model: Path
    vocab_size: int
    characters_read: int
    characters_used: int
    seconds: float
    bytes_per_token: float
    checked: int
    with_space_mark: int


def iter_texts(files: Sequence[Path], key: str) -> Iterator[str]:
    """The texts of files; the first bad record raises DataError."""
    for piece in plan_pieces(files):
        for chunk in read_piece(piece, (key,)):
            parsed = parse_chunk(chunk, (key,))
            if parsed.bad:
                raise DataError(str(parsed.bad[0]))
            for (text,) in parsed.documents:
                yield text


def iter_pieces(texts: Iterator[str]) -> Iterator[str]:
    """Texts cut at line ends into pieces of about 2000 characters, a very long line cut as it comes."""
    for text in texts:
        start = 0
        while start < len(text):
            newline = text.find("\n", start + _PIECE_CHARS, start + 2 * _PIECE_CHARS)
            end = newline + 1 if newline >= 0 else start + 2 * _PIECE_CHARS
            yield text[start:end]
            start = end


def train_sentencepiece(
    inputs: Sequence[str],
    output_prefix: Path,
    vocab_size: int,
    key: str = "text",
    megabytes: float = 64.0,
    seed: int = 0,
    threads: int = 2,
    say: Callable[[str], None] = lambda message: None,
) -> TrainingReport:
    """Trains `<output_prefix>.model`: BPE, byte fallback, no change of the text.

    Of a larger corpus about `megabytes` million characters are used, drawn piece by piece with `seed`.
    Raises DataError for bad inputs, ToolFailure when texts don't come back from their tokens.
    """
    if vocab_size < 300:
        raise DataError(f"--vocab-size {vocab_size}, must be at least 300 (256 bytes, 3 control tokens)")
    draw = _Draw(inputs, key, megabytes, seed, say)
    path = Path(f"{output_prefix}.model")
    return draw.train(path, lambda pieces: _train(pieces, vocab_size, threads), SentencePieceTokenizer)


def train_hf_bpe(
    inputs: Sequence[str],
    output_prefix: Path,
    vocab_size: int,
    key: str = "text",
    megabytes: float = 64.0,
    seed: int = 0,
    threads: int = 2,
    say: Callable[[str], None] = lambda message: None,
) -> TrainingReport:
    """Trains `<output_prefix>.json`, a byte-level BPE of Hugging Face's tokenizers cut into words as GPT-2's.

    Id 0 is <|endoftext|>, the end of a document. Arguments and errors: train_sentencepiece.
    """
    if vocab_size < 257:
        raise DataError(f"--vocab-size {vocab_size}, must be at least 257 (256 bytes, the end of a document)")
    draw = _Draw(inputs, key, megabytes, seed, say)
    path = Path(f"{output_prefix}.json")
    return draw.train(path, lambda pieces: _train_hf(pieces, vocab_size, threads), HFTokenizer)


class _Draw:
    """The texts that a tokenizer learns from."""

    def __init__(
        self, inputs: Sequence[str], key: str, megabytes: float, seed: int, say: Callable[[str], None]
    ) -> None:
        self._started = time.perf_counter()
        self._files, self._key, self._seed = expand_inputs(inputs), key, seed
        self._total = sum(map(len, iter_texts(self._files, key)))
        if self._total == 0:
            raise DataError(f"{', '.join(inputs)}: no text to learn from")
        self._share = min(1.0, megabytes * 1e6 / self._total)
        self._used, self._sample = 0, _Reservoir(_CHECKED, seed)
        say(f"read {self._total / 1e6:.1f} million characters, training on {self._share:.0%} of them ...")

    def _pieces(self) -> Iterator[str]:
        draw = random.Random(self._seed)
        for piece in iter_pieces(iter_texts(self._files, self._key)):
            self._sample.offer(piece)
            if draw.random() < self._share:
                self._used += len(piece)
                yield piece

    def train(
        self, path: Path, learn: Callable[[Iterator[str]], bytes], load: Callable[[Path], Tokenizer]
    ) -> TrainingReport:
        """Writes what `learn` makes of the pieces, once texts come back from its tokens."""
        model = learn(self._pieces())
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            temporary.write_bytes(model)
            tokenizer = load(temporary)
            ratio, marked = check_round_trip(tokenizer, self._sample.kept)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        seconds, checked = time.perf_counter() - self._started, len(self._sample.kept)
        return TrainingReport(
            path, tokenizer.vocab_size, self._total, self._used, seconds, ratio, checked, marked
        )


class _Reservoir:
    """An even sample of a stream."""

    def __init__(self, size: int, seed: int) -> None:
        self._size, self._seen, self._random, self.kept = size, 0, random.Random(seed), list[str]()

    def offer(self, item: str) -> None:
        self._seen += 1
        if len(self.kept) < self._size:
            self.kept.append(item)
        elif (place := self._random.randrange(self._seen)) < self._size:
            self.kept[place] = item


def _train(pieces: Iterator[str], vocab_size: int, threads: int) -> bytes:
    from sentencepiece import SentencePieceTrainer

    out = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=pieces,
            model_writer=out,
            model_type="bpe",
            vocab_size=vocab_size,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            byte_fallback=True,
            max_sentence_length=1 << 20,
            num_threads=threads,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise DataError(f"SentencePiece: {' '.join(str(error).split())[:300]}") from None
    return out.getvalue()


def _train_hf(pieces: Iterator[str], vocab_size: int, threads: int) -> bytes:
    try:
        from tokenizers import Tokenizer as Model
        from tokenizers import decoders, models, pre_tokenizers, trainers
    except ImportError:
        raise DataError('HFTokenizer needs tokenizers: pip install "megnorm[preprocess]"') from None

    os.environ["RAYON_NUM_THREADS"] = str(threads)
    model = Model(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(pieces, trainer)
    if model.get_vocab_size() < vocab_size:
        raise DataError(
            f"--vocab-size {vocab_size}: the texts give only {model.get_vocab_size()} tokens; take more "
            f"text, or a smaller vocabulary"
        )
    return (model.to_str(pretty=True) + "\n").encode()


def check_round_trip(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[float, int]:
    """(bytes a token, texts that hold U+2581 and so can't come back exactly from SentencePiece)."""
    marks = tokenizer.type == SentencePieceTokenizer.type
    size = tokens = marked = 0
    for text, ids in zip(texts, tokenizer.encode(texts), strict=True):
        size += len(text.encode())
        tokens += len(ids)
        marked += marks and _SPACE_MARK in text
        if tokenizer.decode(ids) != (text.replace(_SPACE_MARK, " ") if marks else text):
            raise ToolFailure(f"the trained model doesn't give this text back: {text[:80]!r}")
    return size / max(tokens, 1), marked
