"""The order of samples: pure, 64-bit, each sample once an epoch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megnorm.data.errors import DataError
from megnorm.data.indexed import IndexedDataset, IndexedWriter
from megnorm.data.samples import SampleMap, gpt_dataset
from megnorm.data.seeds import derive_key, permutation
from megnorm.data.splits import parse_split, split_documents


def counted(tmp_path: Path, lengths: list[int]) -> IndexedDataset:
    """Documents whose tokens count on from 0, so that a token says where it stood."""
    with IndexedWriter(tmp_path / "d", "i4") as writer:
        start = 0
        for length in lengths:
            writer.add_document(np.arange(start, start + length))
            start += length
    return IndexedDataset(tmp_path / "d")


def sample_map(lengths: list[int], s: int, **more) -> SampleMap:
    array = np.asarray(lengths, np.int32)
    return SampleMap(array, np.arange(len(array) + 1), (0, len(array)), s, **more)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(0, 30), min_size=1, max_size=40), s=st.integers(1, 12))
def test_without_shuffle_samples_tile_the_tokens(tmp_path: Path, lengths: list[int], s: int) -> None:
    total = sum(lengths)
    if total < s + 1:
        return
    dataset = gpt_dataset(counted(tmp_path, lengths), sequence_length=s, shuffle=False)
    assert dataset.samples_per_epoch == (total - 1) // s
    for n in range(2 * dataset.samples_per_epoch):
        start = n % dataset.samples_per_epoch * s
        assert dataset[n].tolist() == list(range(start, start + s + 1))


def test_each_epoch_has_each_sample_once_and_whole_documents(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(0, 9, 700).tolist()
    dataset = gpt_dataset(counted(tmp_path, lengths), sequence_length=4, seed=3, name="train")
    per_epoch = dataset.samples_per_epoch
    orders = []
    for epoch in range(3):
        samples = [dataset[epoch * per_epoch + k] for k in range(per_epoch)]
        inputs = np.concatenate([sample[:-1] for sample in samples])
        assert len(np.unique(inputs)) == len(inputs) == 4 * per_epoch  # no token twice as input
        labels = np.concatenate([sample[1:] for sample in samples])
        assert len(np.unique(labels)) == 4 * per_epoch  # none twice as label
        positions = sorted(dataset.map.position(epoch * per_epoch + k)[1] for k in range(per_epoch))
        assert positions == list(range(0, 4 * per_epoch, 4))
        orders.append(inputs.tolist())
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_a_sample_is_the_tokens_of_the_epochs_document_order(tmp_path: Path) -> None:
    """Against the definition, written out: permute, join, cut, permute."""
    lengths = np.random.default_rng(1).integers(0, 50, 900).tolist()
    indexed = counted(tmp_path, lengths)
    dataset = gpt_dataset(indexed, (100, 800), 7, seed=5, name="x")
    for epoch in (0, 1, 4):
        order = 100 + permutation(700, derive_key(5, "x", "documents", epoch)).astype(int)
        joined = np.concatenate([indexed.read_document(k) for k in order])
        samples = permutation(dataset.samples_per_epoch, derive_key(5, "x", "samples", epoch)).astype(int)
        for k in range(0, dataset.samples_per_epoch, 37):
            expected = joined[samples[k] * 7 : samples[k] * 7 + 8]
            assert dataset[epoch * dataset.samples_per_epoch + k].tolist() == expected.tolist()


def test_order_does_not_depend_on_the_past() -> None:
    """Resume in a late epoch, go back, jump: always the unbroken run's samples."""
    make = lambda: sample_map([5, 9, 2, 14] * 10, 4, seed=1, name="t")  # noqa: E731
    unbroken = [make().segments(n) for n in range(300)]
    other = make()
    for n in [250, 3, 299, 120, 251, 0]:
        assert other.segments(n) == unbroken[n]
    again = make()
    assert [again.segments(n) for n in range(300)] == unbroken
    assert sample_map([5, 9, 2, 14] * 10, 4, seed=2, name="t").segments(0) != unbroken[0]
    assert sample_map([5, 9, 2, 14] * 10, 4, seed=1, name="u").segments(0) != unbroken[0]


def test_order_is_the_same_in_every_process() -> None:
    code = (
        "import numpy as np; from megnorm.data.samples import SampleMap as M;"
        "m = M(np.full(99, 7, np.int32), np.arange(100), (0, 99), 4, 1, 'train');"
        "print([m.segments(n) for n in (0, 5, 1000)])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_permutation_is_golden() -> None:
    """These numbers may never change: running trainings would continue in another order."""
    order = permutation(10, derive_key(1234, "train", "documents", 0))
    assert order.tolist() == [0, 6, 5, 8, 4, 7, 2, 9, 3, 1]
    for n in (1, 2, 3, 1000):
        assert sorted(permutation(n, 7).tolist()) == list(range(n))


def test_positions_beyond_32_bits() -> None:
    samples = sample_map([2**29] * 5, 2048, shuffle=False)
    assert samples.samples_per_epoch == 1310719
    assert samples.position(1310718) == (0, 2684350464)
    assert samples.segments(1310718) == [(4, 2684350464 - 4 * 2**29, 2049)]
    shuffled = sample_map([2**29] * 5, 2048, seed=1)
    assert max(shuffled.position(n)[1] for n in range(1310719)) == 2684350464


def test_epochs_without_end() -> None:
    samples = sample_map([3] * 1000, 8, seed=1)
    epoch, position = samples.position(3 * 10**12)
    assert epoch == 3 * 10**12 // samples.samples_per_epoch and position % 8 == 0
    assert sum(length for _, _, length in samples.segments(3 * 10**12)) == 9


def test_memory_holds_few_epochs() -> None:
    samples = sample_map([3] * 1000, 8, seed=1)
    for epoch in range(20):
        samples.segments(epoch * samples.samples_per_epoch)
    assert len(samples._epochs) <= 2


def test_split_without_a_sample() -> None:
    with pytest.raises(DataError, match="valid: 2 documents with 8 tokens give no sample of 8 . 1"):
        sample_map([5, 3], 8, name="valid")
    with pytest.raises(DataError):
        sample_map([], 8)
    assert sample_map([5, 4], 8).samples_per_epoch == 1


def test_id_beyond_the_vocabulary(tmp_path: Path) -> None:
    dataset = gpt_dataset(counted(tmp_path, [20]), sequence_length=4, shuffle=False, vocab_size=10)
    assert dataset[0].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(DataError, match="token id 10 in sample 2.*10 entries"):
        dataset[2]


def test_splits_are_whole_documents_and_disjoint() -> None:
    assert split_documents(1000, "949,50,1") == ((0, 949), (949, 999), (999, 1000))
    assert split_documents(7, "1,0,0") == ((0, 7), (7, 7), (7, 7))
    assert split_documents(100, "99,1") == ((0, 99), (99, 100), (100, 100))
    for n in range(5, 200):
        train, valid, test = split_documents(n, "60,25,15")
        assert train[0] == 0 and train[1] == valid[0] and valid[1] == test[0] and test[1] == n
    with pytest.raises(DataError, match="none for test"):
        split_documents(10, "949,50,1")


@pytest.mark.parametrize("text", ["", "a,b", "1,2,3,4", "-1,2", "0,0", "nan,1", "inf,1"])
def test_bad_splits(text: str) -> None:
    with pytest.raises(DataError, match="split"):
        parse_split(text)
