"""Tokenizers: exact round trips, no token that wasn't asked for, no end of document out of a text."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from megnorm.data.errors import DataError
from megnorm.data.tokenizer_training import iter_pieces, train_sentencepiece
from megnorm.data.tokenizers import (
    ByteTokenizer,
    HFTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    load_tokenizer,
)

ODD = [
    "",
    " ",
    "  two  spaces  ",
    "\n",
    "\tdef f(x):\r\n\t\treturn x\n\n\n",
    "    indented\n        more\n",
    "emoji 😀👩‍👩‍👧, combining e\u0301, ﬁ ligature, full width Ａ, ½",
    "\u2028\u2029\ufeff\u200b\u3000\xa0",
    "nul \x00 and \x01 and \x7f",
    "</s><s><unk><pad><0x41> <|endoftext|> <|endoftext|>",
    "<|endoftext|>",
    "汉字 кириллица العربية",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus from this repository's own sources, a SentencePiece model and two Hugging Face ones."""
    path = tmp_path_factory.mktemp("tokenizers")
    sources = sorted((Path(__file__).parents[2] / "megnorm").rglob("*.py"))
    lines = [orjson.dumps({"text": source.read_text()}) for source in sources]
    (path / "corpus.jsonl").write_bytes(b"\n".join(lines))
    train_sentencepiece([str(path / "corpus.jsonl")], path / "sp", 600)
    for special in (True, False):
        hugging_face(path / "corpus.jsonl", path / f"hf-{special}.json", special)
    return path


def hugging_face(corpus: Path, output: Path, special: bool) -> None:
    """Byte-level BPE with an end token that is special, or merely added (and then matched in text)."""
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [orjson.loads(line)["text"] for line in corpus.read_bytes().splitlines()]
    model.train_from_iterator(texts, trainer)
    if special:
        model.add_special_tokens(["<|endoftext|>", "<pad>"])
    else:
        model.add_tokens(["<|endoftext|>"])
    model.save(str(output))


def tokenizers_of(folder: Path) -> list[Tokenizer]:
    return [
        ByteTokenizer(),
        SentencePieceTokenizer(folder / "sp.model"),
        HFTokenizer(folder / "hf-True.json"),
        HFTokenizer(folder / "hf-False.json"),
    ]


def test_odd_texts_come_back_with_nothing_added(folder: Path) -> None:
    for tokenizer in tokenizers_of(folder):
        for text, ids in zip(ODD, tokenizer.encode(ODD), strict=True):
            assert tokenizer.decode(ids) == text, (tokenizer, text)
            assert tokenizer.eod is not None and tokenizer.eod not in ids, (tokenizer, text)
            assert all(0 <= i < tokenizer.vocab_size for i in ids)
        assert tokenizer.encode([""]) == [[]]
        ids = tokenizer.encode(["end"])[0]
        assert tokenizer.decode([*ids, tokenizer.eod]) == "end"


def test_a_batch_is_each_text_by_itself(folder: Path) -> None:
    for tokenizer in tokenizers_of(folder):
        assert tokenizer.encode(ODD) == [tokenizer.encode([text])[0] for text in ODD]


def test_sentencepiece_learns_indentation_and_line_ends(folder: Path) -> None:
    tokenizer = SentencePieceTokenizer(folder / "sp.model")
    assert len(tokenizer.encode([" " * 8])[0]) == 1
    assert len(tokenizer.encode([":\n"])[0]) == 1


def test_pieces_join_to_the_text() -> None:
    texts = ["a\n" * 3000, "b" * 9000, "", "short", "x" * 1999 + "\n" + "y" * 10]
    assert "".join(iter_pieces(iter(texts))) == "".join(texts)
    assert max(map(len, iter_pieces(iter(texts)))) <= 4000


def test_training_twice_gives_the_same_model(folder: Path, tmp_path: Path) -> None:
    train_sentencepiece([str(folder / "corpus.jsonl")], tmp_path / "again", 600)
    assert (tmp_path / "again.model").read_bytes() == (folder / "sp.model").read_bytes()


def test_training_errors(folder: Path, tmp_path: Path) -> None:
    corpus = [str(folder / "corpus.jsonl")]
    for arguments, message in [
        ((corpus, tmp_path / "m", 100), "--vocab-size 100"),
        ((corpus, tmp_path / "m", 60_000), "(?i)vocab"),
        ((corpus, tmp_path / "m", 600, "body"), 'corpus.jsonl:1: no key "body"'),
        (([str(tmp_path / "no.jsonl")], tmp_path / "m", 600), "no such file"),
    ]:
        with pytest.raises(DataError, match=message):
            train_sentencepiece(*arguments)
    assert list(tmp_path.iterdir()) == []


def test_load_errors(folder: Path) -> None:
    for kind, path, message in [
        ("GPT2BPETokenizer", None, "must be one of SentencePieceTokenizer, HFTokenizer, TikTokenizer"),
        ("SentencePieceTokenizer", None, "needs a model file"),
        ("SentencePieceTokenizer", folder / "none.model", "no such tokenizer model"),
        ("SentencePieceTokenizer", folder / "corpus.jsonl", "not a SentencePiece model"),
        ("HFTokenizer", folder / "corpus.jsonl", "not a tokenizer.json"),
        ("HFTokenizer", folder, "tokenizer.json: no such file"),
    ]:
        with pytest.raises(DataError, match=message):
            load_tokenizer(kind, path)
