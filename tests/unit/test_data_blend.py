"""Blends: shares at every prefix, random access, no end."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megnorm.data.blend import Blend, Mixture, Phase
from megnorm.data.errors import DataError
from megnorm.data.samples import SampleMap

WEIGHTS = st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=12)


def step_by_step(weights: list[float], samples: int) -> list[int]:
    """The definition: of the allowed sources the one that is due first."""
    shares = np.asarray(weights) / math.fsum(weights)
    counts = np.zeros(len(shares), int)
    out = []
    for n in range(samples):
        allowed = counts < shares * (n + 1)
        source = int(np.where(allowed, (counts + 1) / shares, np.inf).argmin())
        counts[source] += 1
        out.append(source)
    return out


@settings(max_examples=25, deadline=None)
@given(weights=WEIGHTS)
def test_blocks_give_the_definition(weights: list[float]) -> None:
    assert Mixture(weights).sources(0, 3500).tolist() == step_by_step(weights, 3500)


@settings(max_examples=25, deadline=None)
@given(weights=WEIGHTS)
def test_every_prefix_is_within_one_sample(weights: list[float]) -> None:
    mixture = Mixture(weights)
    sources = mixture.sources(0, 20_000)
    taken = np.cumsum(sources[:, None] == np.arange(len(weights)), axis=0)
    shares = mixture.weights * np.arange(1, 20_001)[:, None]
    assert np.abs(taken - shares).max() <= 1 + 1e-9


def test_many_very_unequal_sources_keep_their_shares() -> None:
    """Where taking the largest deficit leaves some source more than 1 behind."""
    random = np.random.default_rng(0)
    for _ in range(20):
        weights = random.random(30) ** 3 + 1e-6
        mixture = Mixture(weights.tolist())
        sources = mixture.sources(0, 5000)
        taken = np.cumsum(sources[:, None] == np.arange(30), axis=0)
        assert np.abs(taken - mixture.weights * np.arange(1, 5001)[:, None]).max() <= 1 + 1e-9


def test_random_access_equals_the_stream() -> None:
    weights = [0.7, 0.2, 0.05, 0.05]
    sources = Mixture(weights).sources(0, 300_000)
    for n in (0, 1023, 1024, 299_999, 5000):
        mixture = Mixture(weights)
        assert mixture.locate(n) == (sources[n], np.count_nonzero(sources[:n] == sources[n]))
        assert mixture.counts(n).tolist() == np.bincount(sources[:n], minlength=4).tolist()
    assert Mixture(weights).sources(5000, 7000).tolist() == sources[5000:7000].tolist()


def test_far_positions_keep_their_shares() -> None:
    mixture = Mixture([0.001, 0.999])
    assert np.abs(mixture.counts(3_000_000) - [3000, 2_997_000]).max() <= 1


def test_weights_are_normalised() -> None:
    assert Mixture([0.5, 0.4999]).weights.sum() == pytest.approx(1.0)
    assert Mixture([7, 3]).sources(0, 2000).tolist() == Mixture([70, 30]).sources(0, 2000).tolist()


@pytest.mark.parametrize("weights", [[], [1.0, 0.0], [1.0, -1.0], [float("nan")], [float("inf"), 1.0]])
def test_bad_weights(weights: list[float]) -> None:
    with pytest.raises(DataError):
        Mixture(weights)


class Source:
    """Gives [source, sample] so that a test sees what was asked."""

    def __init__(self, source: int, sequence_length: int = 1) -> None:
        self.source, self.sequence_length = source, sequence_length

    def __getitem__(self, sample: int) -> np.ndarray:
        return np.array([self.source, sample])


def test_each_source_is_read_in_its_own_order() -> None:
    blend = Blend([Source(0), Source(1), Source(2)], Phase(0, (0.5, 0.3, 0.2)))
    seen: list[list[int]] = [[], [], []]
    for n in range(3000):
        source, sample = blend[n]
        seen[source].append(int(sample))
    assert all(numbers == list(range(len(numbers))) for numbers in seen)
    assert [len(numbers) for numbers in seen] == [1500, 900, 600]


def test_small_sources_go_on_into_their_next_epochs() -> None:
    """Two sources of 100 samples at 0.001 and 0.999, far beyond their ends."""
    maps = [SampleMap(np.full(100, 2, np.int32), np.arange(101), (0, 100), 1, 0, str(i)) for i in (0, 1)]
    mixture = Mixture([0.001, 0.999])
    for n in range(5000):
        source, sample = mixture.locate(n)
        assert len(maps[source].segments(sample)) > 0


def test_datasets_must_fit_together() -> None:
    with pytest.raises(DataError, match="2 blend weights for 1 datasets"):
        Blend([Source(0)], Phase(0, (1.0, 1.0)))
    with pytest.raises(DataError, match="sequence lengths"):
        Blend([Source(0), Source(1, 2)], Phase(0, (1.0, 1.0)))
