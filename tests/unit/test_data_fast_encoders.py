"""Fast encoders: equal ids, or they are not used; the end of a document never comes from a text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megnorm.data import fast_encoders as module
from megnorm.data.command import ToolFailure
from megnorm.data.errors import DataError
from megnorm.data.fast_encoders import TRICKY, GigatokenEncoder, check_parity, make_encoder, settle_encoder
from megnorm.data.preprocess import PreprocessOptions, preprocess
from megnorm.data.preprocess_encode import insert_ends
from megnorm.data.tokenizer_training import train_hf_bpe, train_sentencepiece
from megnorm.data.tokenizers import TikTokenizer, load_tokenizer

pytest.importorskip("gigatoken", reason="gigatoken, of the extra preprocess")
pytest.importorskip("tiktoken", reason="tiktoken, of the extra preprocess")
KINDS = {"hf": "HFTokenizer", "sp": "SentencePieceTokenizer"}
PAIRS = [("hf", "gigatoken"), ("hf", "tiktoken"), ("sp", "gigatoken")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoders")
    source = "".join(p.read_text() for p in sorted(Path(module.__file__).parent.glob("*.py")))
    texts = [source[a : a + 2000] for a in range(0, len(source), 2000)]
    (folder / "corpus.jsonl").write_bytes(b"".join(orjson.dumps({"text": text}) + b"\n" for text in texts))
    train_hf_bpe([str(folder / "corpus.jsonl")], folder / "hf", 900)
    train_sentencepiece([str(folder / "corpus.jsonl")], folder / "sp", 900)
    return folder


def tokenizer(folder: Path, name: str):
    return load_tokenizer(KINDS[name], folder / f"{name}.{'json' if name == 'hf' else 'model'}")


@pytest.mark.parametrize(("name", "backend"), PAIRS)
def test_equal_ids_for_any_text(folder: Path, name: str, backend: str) -> None:
    own = tokenizer(folder, name)
    fast = make_encoder(own, backend)

    @settings(max_examples=300, deadline=None)
    @given(st.lists(st.text(max_size=40), max_size=4))
    def check(texts: list[str]) -> None:
        check_parity(own, fast, texts)

    check()
    check_parity(own, fast, TRICKY)
    encoder, reason = settle_encoder(own, backend, ["some text"])
    assert (encoder.backend, reason) == (backend, None)


@pytest.mark.parametrize(("name", "backend"), [*PAIRS, ("hf", "native"), ("sp", "native")])
def test_the_end_spelt_in_a_text_is_text(folder: Path, name: str, backend: str) -> None:
    own = tokenizer(folder, name)
    texts = ["a<|endoftext|>b", "<|endoftext|>", "</s><s>", "<|endoftext|></s>" * 3]
    ids, lengths = make_encoder(own, backend).encode(texts)
    assert own.eod not in ids.tolist()
    assert own.decode(ids.tolist()) == "".join(texts)
    assert lengths.sum() == len(ids)


@pytest.mark.parametrize(("name", "backend"), PAIRS)
def test_same_files_from_every_backend(folder: Path, tmp_path: Path, name: str, backend: str) -> None:
    files = []
    for said in ("native", backend):
        model = tokenizer(folder, name).path
        options = PreprocessOptions(
            (str(folder / "corpus.jsonl"),),
            str(tmp_path / said),
            KINDS[name],
            str(model),
            append_eod=True,
            backend=said,
        )
        report = preprocess(options)
        assert report.backend == said
        files.append([Path(report.prefixes[0] + suffix).read_bytes() for suffix in (".bin", ".idx")])
    assert files[0] == files[1]


class Wrong:
    backend = "wrong"

    def encode(self, texts):
        return np.zeros(0, np.uint32), np.zeros(len(texts), np.int32)


def test_other_ids_are_found_before_use(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tokenizer(folder, "hf")
    monkeypatch.setitem(module._ENCODERS, "gigatoken", lambda tokenizer: Wrong())
    used, reason = settle_encoder(own, "auto", [])
    assert used.backend == "native" and reason is not None and "wrong has other ids" in reason
    with pytest.raises(DataError, match="has other ids than HFTokenizer"):
        settle_encoder(own, "gigatoken", [])


def test_other_ids_are_found_in_use(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder that passes the check at the start and errs later ends the run."""
    encode = GigatokenEncoder.encode

    def erring(self, texts):
        ids, lengths = encode(self, texts)
        return (ids, lengths) if TRICKY[1] in texts else (ids + 1, lengths)

    monkeypatch.setattr(GigatokenEncoder, "encode", erring)
    options = PreprocessOptions(
        (str(folder / "corpus.jsonl"),),
        str(tmp_path / "o"),
        "HFTokenizer",
        str(folder / "hf.json"),
        backend="gigatoken",
    )
    with pytest.raises(ToolFailure, match=r"gave id|other ids"):
        preprocess(options)
    assert not list(tmp_path.glob("*.idx"))


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {
            "pre_tokenizer": {
                "type": "ByteLevel",
                "add_prefix_space": True,
                "trim_offsets": True,
                "use_regex": True,
            }
        },
    ],
)
def test_what_tiktoken_cannot_run_is_refused(folder: Path, tmp_path: Path, change: dict) -> None:
    config = json.loads((folder / "hf.json").read_text()) | change
    (tmp_path / "t.json").write_text(json.dumps(config))
    own = load_tokenizer("HFTokenizer", tmp_path / "t.json")
    with pytest.raises(DataError):
        settle_encoder(own, "tiktoken", [])
    used, _ = settle_encoder(own, "auto", ["Some Text"])
    check_parity(own, used, (*TRICKY, "Some Text"))


def test_what_a_backend_cannot_run(folder: Path) -> None:
    with pytest.raises(DataError, match="SentencePieceTokenizer can't be run by tiktoken"):
        settle_encoder(tokenizer(folder, "sp"), "tiktoken", [])
    with pytest.raises(DataError, match="ByteTokenizer can't be run by gigatoken"):
        settle_encoder(load_tokenizer("ByteTokenizer"), "gigatoken", [])
    with pytest.raises(DataError, match="--tokenizer-backend fast, must be one of"):
        settle_encoder(load_tokenizer("ByteTokenizer"), "fast", [])
    encoder, reason = settle_encoder(load_tokenizer("ByteTokenizer"), "auto", [])
    assert (encoder.backend, reason) == ("native", None)


def test_the_memory_of_gigatoken_is_given_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tokenizer(folder, "hf")
    encoder = GigatokenEncoder(own)
    first = encoder._model
    resident = iter([0, 33 << 20, 33 << 20, 34 << 20])
    monkeypatch.setattr(module, "_resident_bytes", lambda: next(resident))
    encoder._fresh = next(resident)
    encoder.encode(["words"])
    assert encoder._model is not first
    second = encoder._model
    encoder.encode(["words"])
    assert encoder._model is second
    monkeypatch.setattr(module, "_resident_bytes", lambda: 0)
    encoder.encode(["w" * (5 << 20)])
    assert encoder._model is not second


def test_tiktoken_files(tmp_path: Path) -> None:
    import base64

    tokens = [bytes([b]) for b in range(256)] + [b"he", b"ll", b"hell", b" w"]
    lines = b"".join(base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(tokens))
    (tmp_path / "r50k_base.tiktoken").write_bytes(lines)
    own = load_tokenizer("TikTokenizer", tmp_path / "r50k_base.tiktoken")
    assert isinstance(own, TikTokenizer) and (own.eod, own.vocab_size) == (50256, 50257)
    assert own.encode(["hello w", ""]) == [[258, 111, 259], []]
    assert own.decode([258, 111, 259, 50256]) == "hello w"
    assert own.eod not in own.encode(["<|endoftext|>"])[0]
    for name, data, message in [
        ("mine.tiktoken", lines, "must say its encoding"),
        ("cl100k_base.tiktoken", lines[:500], "some single byte has no rank"),
        ("o200k_base.tiktoken", lines + b"x y z\n", "o200k_base.tiktoken:261: not a tiktoken rank"),
        ("r50k_base.tiktoken", lines + base64.b64encode(b"abc") + b" 60000\n", "ranks must be 0 to"),
    ]:
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match=message):
            load_tokenizer("TikTokenizer", tmp_path / name)


def test_published_patterns_are_tiktokens_own() -> None:
    public = pytest.importorskip("tiktoken_ext.openai_public")
    import inspect

    source = inspect.getsource(public)
    assert TikTokenizer._ENCODINGS["r50k_base"][0] == public.r50k_pat_str
    assert TikTokenizer._ENCODINGS["cl100k_base"][0] in source
    for part in TikTokenizer._ENCODINGS["o200k_base"][0].split("|"):
        assert part in source


@given(st.lists(st.lists(st.integers(1, 99), max_size=5), max_size=12))
def test_ends_stand_behind_filled_documents(documents: list[list[int]]) -> None:
    lengths = np.array([len(d) for d in documents], np.int32)
    ids = np.array([i for d in documents for i in d], np.uint32)
    out = insert_ends(ids, lengths, lengths > 0, 0, np.dtype("u2"))
    assert out.tolist() == [i for d in documents if d for i in [*d, 0]]
