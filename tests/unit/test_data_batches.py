"""Batches: the same global batch on every layout, and a mean over tokens whatever the masks."""

from __future__ import annotations

import numpy as np
import pytest

from megnorm.data.batches import RowRules, batch_digest, evaluation_batches, micro_batches
from megnorm.data.errors import DataError

S = 8
LAYOUTS = [(8, 1), (4, 1), (1, 1), (4, 2), (2, 2), (1, 4), (2, 4), (1, 8)]  # (micro batch, ranks)


class Numbered:
    """Sample n is n * 100, n * 100 + 1, ..."""

    sequence_length = S

    def __getitem__(self, sample: int) -> np.ndarray:
        return sample * 100 + np.arange(S + 1)


def loss_of(label: np.ndarray) -> np.ndarray:
    """Stands for the cross entropy: some number for each target."""
    return np.sin(label.astype(np.float64)) + 2.0


def uneven(labels: np.ndarray) -> np.ndarray:
    """A mask that leaves very different counts to the rows, none to some."""
    return labels % 100 <= (labels // 100 * 3) % 10 - 1


def engine_loss(shares: list[list]) -> float:
    """What the engine computes: a mean over micro batches, then over ranks."""
    ranks = [np.mean([np.sum(b.weights * loss_of(b.labels)) for b in batches]) for batches in shares]
    return float(np.mean(ranks))


@pytest.mark.parametrize(("micro", "ranks"), LAYOUTS)
def test_union_is_the_global_batch(micro: int, ranks: int) -> None:
    shares = [micro_batches(Numbered(), 24, 8, micro, rank, ranks) for rank in range(ranks)]
    assert {len(batches) for batches in shares} == {8 // (micro * ranks)}
    rows = np.concatenate([b.tokens for batches in shares for b in batches])
    assert sorted(rows[:, 0].tolist()) == [n * 100 for n in range(24, 32)]
    for batch in shares[0]:
        assert batch.tokens.shape == batch.labels.shape == batch.weights.shape == (micro, S)
        assert (batch.labels == batch.tokens + 1).all()
        assert (batch.tokens.dtype, batch.weights.dtype) == (np.int64, np.float32)


@pytest.mark.parametrize(("micro", "ranks"), LAYOUTS)
def test_mean_of_means_is_the_mean_over_valid_tokens(micro: int, ranks: int) -> None:
    for mask in (uneven, lambda labels: np.ones(labels.shape, bool)):
        labels = np.stack([Numbered()[n][1:] for n in range(8)])
        expected = loss_of(labels)[mask(labels)].mean()
        shares = [
            micro_batches(Numbered(), 0, 8, micro, rank, ranks, RowRules(mask)) for rank in range(ranks)
        ]
        assert engine_loss(shares) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("ranks", [1, 2])
def test_nine_tokens_of_ten_and_one_of_two(ranks: int) -> None:
    """9 valid tokens with loss 10 and 1 with loss 2 give 9.2; a mean of means gives 6."""

    class Long(Numbered):
        sequence_length = 9

        def __getitem__(self, sample: int) -> np.ndarray:
            return sample * 100 + np.arange(10)

    mask = lambda labels: (labels < 100) | (labels == 101)  # noqa: E731
    shares = [micro_batches(Long(), 0, 2, 1, rank, ranks, RowRules(mask)) for rank in range(ranks)]
    loss = np.mean(
        [
            np.mean([np.sum(b.weights * np.where(b.labels < 100, 10.0, 2.0)) for b in batches])
            for batches in shares
        ]
    )
    assert loss == pytest.approx(9.2)


def test_nothing_valid_gives_zero_not_nan() -> None:
    nothing = lambda labels: np.zeros(labels.shape, bool)  # noqa: E731
    for batch in micro_batches(Numbered(), 0, 4, 2, 0, 1, RowRules(nothing)):
        assert (batch.weights == 0).all()
    assert (evaluation_batches(Numbered(), 3, 2, 0, 1, RowRules(nothing))[0].weights == 0).all()


@pytest.mark.parametrize("samples", [1, 3, 7, 8, 13])
@pytest.mark.parametrize(("micro", "ranks"), [(4, 1), (3, 2), (2, 4), (1, 3)])
def test_evaluation_is_the_same_number_on_every_layout(samples: int, micro: int, ranks: int) -> None:
    labels = np.stack([Numbered()[n][1:] for n in range(samples)])
    for mask in (uneven, lambda labels: np.ones(labels.shape, bool)):
        shares = [
            evaluation_batches(Numbered(), samples, micro, rank, ranks, RowRules(mask))
            for rank in range(ranks)
        ]
        assert len({len(batches) for batches in shares}) == 1
        assert {b.tokens.shape for batches in shares for b in batches} == {(micro, S)}
        valid = mask(labels)
        expected = loss_of(labels)[valid].mean() if valid.any() else 0.0
        assert engine_loss(shares) == pytest.approx(expected, rel=1e-6)


def test_global_batch_that_does_not_divide() -> None:
    with pytest.raises(DataError, match="global batch 6 must be a multiple of micro batch 2 x 2"):
        micro_batches(Numbered(), 0, 6, 2, 0, 2)


def test_digest_names_the_tokens() -> None:
    digest = batch_digest(Numbered(), 16, 8)
    assert len(digest) == 16 and digest == batch_digest(Numbered(), 16, 8)
    assert digest != batch_digest(Numbered(), 8, 8)


def test_data_parallel_size_may_change_between_steps() -> None:
    """Samples of steps on 1, 2 and 4 ranks join to one stream."""
    seen: list[int] = []
    for step, ranks in enumerate((1, 2, 4)):
        for rank in range(ranks):
            for batch in micro_batches(Numbered(), 8 * step, 8, 2, rank, ranks):
                seen += (batch.tokens[:, 0] // 100).tolist()
    assert sorted(seen) == list(range(24))
