"""megatron-core itself: each reads the other's files, equal bytes, equal orders, equal masks."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megnorm.data.documents import row_documents
from megnorm.data.indexed import IndexedDataset, IndexedWriter
from megnorm.data.megatron_order import MegatronMap
from megnorm.data.samples import GPTDataset

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    gpt = pytest.importorskip(
        "megatron.core.datasets.gpt_dataset", reason="megatron-core, which has no wheel for this system"
    )
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    from megatron.core.datasets.utils import Split

torch = pytest.importorskip("torch")
TOKENIZER = SimpleNamespace(vocab_size=1000, eod=0, pad=-1, unique_identifiers={})


def documents(count: int = 300, empty: bool = True) -> list[list[int]]:
    random = np.random.default_rng(0)
    sizes = random.integers(0 if empty else 1, 90, count)
    return [[*random.integers(1, 1000, size - 1).tolist(), 0] if size else [] for size in sizes]


def write(prefix: Path, texts: list[list[int]], dtype: str = "u2") -> None:
    with IndexedWriter(prefix, dtype) as writer:
        for ids in texts:
            writer.add_document(ids)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_same_bytes_as_the_builder(tmp_path: Path, dtype: type) -> None:
    texts = documents()
    write(tmp_path / "ours", texts, np.dtype(dtype).str)
    builder = indexed.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    for ids in texts:
        builder.add_document(torch.tensor(ids, dtype=torch.int64), [len(ids)] if ids else [])
    builder.finalize(str(tmp_path / "theirs.idx"))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()


def test_each_reads_the_other(tmp_path: Path) -> None:
    texts = documents()
    write(tmp_path / "d", texts)
    theirs, ours = indexed.IndexedDataset(str(tmp_path / "d")), IndexedDataset(tmp_path / "d")
    assert [theirs[k].tolist() for k in range(len(theirs))] == [ids for ids in texts if ids]
    assert theirs.document_indices.tolist() == ours.documents.tolist()
    assert [ours.read_document(k).tolist() for k in range(len(texts))] == texts
    assert theirs.get(3, 1, 2).tolist() == ours.read(3, 1, 2).tolist()


def megatron(tmp_path: Path, s: int, sequences: tuple[int, int], samples: int, seed: int):
    config = gpt.GPTDatasetConfig(
        random_seed=seed,
        sequence_length=s,
        blend=(["d"], None),
        split="1,0,0",
        path_to_cache=str(tmp_path / "cache"),
        tokenizer=TOKENIZER,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    dataset = indexed.IndexedDataset(str(tmp_path / "d"))
    indices = np.arange(*sequences, dtype=np.int32)
    return gpt.GPTDataset(dataset, str(sequences), indices, samples, Split.train, config)


# One epoch; several; a last epoch that is used little, and much; more epochs than samples.
@pytest.mark.parametrize("samples", [1, 100, 230, 390, 1000])
@pytest.mark.parametrize(("s", "sequences"), [(64, (0, 290)), (7, (20, 90)), (1, (5, 9))])
def test_same_order(tmp_path: Path, s: int, sequences: tuple[int, int], samples: int) -> None:
    write(tmp_path / "d", documents())
    theirs = megatron(tmp_path, s, sequences, samples, 1234)
    dataset = IndexedDataset(tmp_path / "d")
    ours = MegatronMap(dataset.lengths, sequences, s, samples, 1234)
    pairs = [
        (theirs.document_index, ours.document_index),
        (theirs.sample_index, ours.sample_index()),
        (theirs.shuffle_index, ours.shuffle_index),
    ]
    for theirs_index, ours_index in pairs:
        assert theirs_index.dtype == ours_index.dtype
        assert np.array_equal(theirs_index, ours_index)
    stream = GPTDataset(dataset, ours)
    assert ours.num_samples == len(theirs) >= samples
    for n in range(0, ours.num_samples, max(1, ours.num_samples // 40)):
        assert stream[n].tolist() == theirs._query_document_sample_shuffle_indices(n)[0].tolist()
    with pytest.raises(IndexError, match="order of Megatron"):
        stream[ours.num_samples]


def test_same_order_however_much_of_the_last_epoch_is_used(tmp_path: Path) -> None:
    write(tmp_path / "d", documents(60))
    dataset = IndexedDataset(tmp_path / "d")
    for samples in range(1, 150):
        theirs = megatron(tmp_path, 60, (0, len(dataset)), samples, samples)
        ours = MegatronMap(dataset.lengths, (0, len(dataset)), 60, samples, samples)
        assert np.array_equal(theirs.document_index, ours.document_index), samples
        assert np.array_equal(theirs.shuffle_index, ours.shuffle_index), samples
    assert ours.epochs > 3


def test_same_positions_and_loss_mask(tmp_path: Path) -> None:
    """Megatron finds the documents by their end tokens, we by the index: the same where each has one."""
    write(tmp_path / "d", documents())
    dataset = IndexedDataset(tmp_path / "d")
    order = MegatronMap(dataset.lengths, (0, len(dataset)), 64, 100, 1)
    stream = GPTDataset(dataset, order)
    for n in range(100):
        tokens = torch.from_numpy(stream[n][:-1])
        mask, loss, positions = gpt._get_ltor_masks_and_position_ids(tokens, 0, True, True, True, True)
        ours = row_documents(stream.segments(n), 64)
        assert ours.positions.tolist() == positions.tolist()
        allowed = np.tril(ours.documents[:, None] == ours.documents[None, :])
        assert np.array_equal(allowed, ~mask[0].numpy())
        assert np.array_equal(ours.ends, loss.numpy() == 0)
