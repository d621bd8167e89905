"""Counting models: closed forms on a tiny text, probabilities that sum to 1, speed at the demo's size."""

import numpy as np
import pytest

from megnorm.observe.baselines import Bigram, Unigram, fit_baselines


def test_closed_form() -> None:
    """Pairs 0-1, 1-0, 0-1 in one sample and 0-2 in another; vocabulary 4, discount 0.5."""
    train = np.array([[0, 1, 0, 1], [0, 2, 0, 2]])
    # targets: 1 0 1 2 0 2 -> p(w) = (c + 1) / (6 + 4)
    unigram = np.array([3, 3, 3, 1]) / 10
    got = fit_baselines(train, np.array([[0, 1], [3, 3], [0, 3]]), vocab=4, discount=0.5)
    assert got.unigram == pytest.approx(-np.log(unigram[[1, 3, 3]]).mean())
    after_0 = 0.5 * 2 / 4  # four pairs begin with 0, with two followers
    expected = [(2 - 0.5) / 4 + after_0 * 0.3, 0.1, after_0 * 0.1]
    assert got.bigram == pytest.approx(-np.log(expected).mean())
    assert (got.discount, got.train_tokens, got.valid_tokens) == (0.5, 6, 3)


def test_probabilities_sum_to_one() -> None:
    rng = np.random.default_rng(0)
    before, targets = rng.integers(0, 20, 300), rng.zipf(1.5, 300) % 30
    assert Unigram(targets, 30).probability.sum() == pytest.approx(1.0)
    model = Bigram(before, targets, 30)
    assert 0 < model.discount < 1
    for u in range(30):  # 20..29 were never seen before another token
        assert model.probability(np.full(30, u), np.arange(30)).sum() == pytest.approx(1.0), u


def test_discount_from_pairs_seen_once_and_twice() -> None:
    before, targets = np.array([0, 0, 0, 1, 1, 1, 1]), np.array([1, 2, 3, 0, 0, 2, 2])
    assert Bigram(before, targets, 4).discount == 3 / (3 + 2 * 2)
    assert Bigram(np.array([0, 1]), np.array([1, 2]), 4).discount == 0.75


def test_bigram_beats_unigram_where_order_matters() -> None:
    rng = np.random.default_rng(1)
    text = np.cumsum(rng.integers(1, 3, 4000)) % 50
    got = fit_baselines(text[:3200].reshape(-1, 16), text[3200:].reshape(-1, 16), 50)
    assert got.bigram < 0.9 and got.unigram > 3.8


def test_wrong_tokens_are_refused() -> None:
    good = np.array([[0, 1]])
    with pytest.raises(ValueError, match="beyond a vocabulary of 2"):
        fit_baselines(good, np.array([[0, 2]]), 2)
    with pytest.raises(ValueError, match="samples"):
        fit_baselines(np.zeros((0, 2), int), good, 2)


def test_large_vocabulary_does_not_overflow() -> None:
    train = np.array([[250_000, 249_999, 250_000]], dtype=np.int32)
    assert np.isfinite(fit_baselines(train, train, 250_001).bigram)
