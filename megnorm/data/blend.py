"""Several sources in one stream, each with its share of the samples."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megnorm.data.errors import DataError

_BLOCK = 1024  # samples between two stored states
_LANES = 4096  # blocks that are computed side by side
_BLOCKS_KEPT = 4


class SampleSource(Protocol):
    """What gives samples: `source[n]` is i64 [sequence_length + 1], for every n >= 0.

    `segments` (document, offset in it, tokens) are the pieces of a sample; where they are fewer tokens than
    that, zeros stand behind them.
    """

    sequence_length: int

    def __getitem__(self, sample: int) -> np.ndarray: ...

    def segments(self, sample: int) -> list[tuple[int, int, int]]: ...


class Mixture:
    """Which source gives sample n, for shares `weights` (normalised): a pure function of (weights, n).

    After n samples every source has given within 1 of weights[i] * n, for every n. The j-th sample of a
    source with share w is due before time (j + 1) / w and not allowed before j / w; each step takes, among
    the sources that are allowed, the one that is due first. (Taking the largest deficit, as Megatron does,
    can leave a source more than 1 behind when there are many; earliest deadline never does: Baruah et al.
    1996, "Proportionate progress", for one processor.)

    The stream is defined step by step, but computed blockwise. Within a block only the samples due in it
    matter, and up to one a source carried over: a sample carried in can take any place, so it pushes out
    exactly the sample of the block that is due last. So all blocks run side by side as if nothing were
    carried, and a short scan over the blocks corrects their ends.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        for weight in weights:
            if not (math.isfinite(weight) and weight > 0):
                raise DataError(f"blend weight {weight}, must be above 0; leave the dataset out instead")
        if not weights:
            raise DataError("a blend needs at least one dataset")
        self.weights = np.asarray(weights, np.float64) / math.fsum(weights)
        self._states = np.zeros((1, len(weights)), np.int64)  # samples given before each block
        self._blocks: OrderedDict[int, tuple[np.ndarray, np.ndarray]] = OrderedDict()

    def locate(self, sample: int) -> tuple[int, int]:
        """(source, number of the sample within the source) of a global sample."""
        if sample < 0:
            raise IndexError(f"sample {sample}, must be >= 0")
        block, step = divmod(int(sample), _BLOCK)
        sources, numbers = self._block(block)
        return int(sources[step]), int(numbers[step])

    def counts(self, samples: int) -> np.ndarray:
        """i64 [sources]: how many of the first `samples` samples each source gives."""
        block, step = divmod(int(samples), _BLOCK)
        self._extend(block)
        sources = self._block(block)[0][:step] if step else np.empty(0, np.int64)
        return self._states[block] + np.bincount(sources, minlength=len(self.weights))

    def sources(self, first: int, last: int) -> np.ndarray:
        """i16 [last - first]: the sources of the samples [first, last)."""
        a, b = first // _BLOCK, -(-last // _BLOCK)
        self._extend(b)
        out = np.empty((b - a, _BLOCK), np.int16)
        for low in range(a, b, _LANES):
            high = min(low + _LANES, b)
            _run(self.weights, low, self._states[low:high].copy(), out[low - a : high - a])
        return out.reshape(-1)[first - a * _BLOCK : last - a * _BLOCK]

    def _block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        if block not in self._blocks:
            sources = self.sources(block * _BLOCK, (block + 1) * _BLOCK)
            numbers = np.empty(_BLOCK, np.int64)
            for i, start in enumerate(self._states[block]):
                mine = sources == i
                numbers[mine] = start + np.arange(np.count_nonzero(mine))
            self._blocks[block] = sources, numbers
            if len(self._blocks) > _BLOCKS_KEPT:
                self._blocks.popitem(last=False)
        return self._blocks[block]

    def _extend(self, blocks: int) -> None:
        """Makes the states before the blocks 0..`blocks` known."""
        while len(self._states) <= blocks:
            first = len(self._states) - 1
            lanes = min(_LANES, max(blocks - first, first, 1))  # doubles, so that short runs start at once
            edges = (first + np.arange(lanes))[:, None] * _BLOCK
            ends = np.ceil(self.weights * edges).astype(np.int64)  # as if nothing were carried in
            _run(self.weights, first, ends, None)
            states = np.empty((lanes + 1, len(self.weights)), np.int64)
            states[0] = self._states[-1]
            for lane in range(lanes):
                states[lane + 1] = self._correct(ends[lane], states[lane], (first + lane + 1) * _BLOCK)
            self._states = np.concatenate([self._states, states[1:]])

    def _correct(self, end: np.ndarray, start: np.ndarray, samples: int) -> np.ndarray:
        """State after a block, from the state before it and the end of the block run without carry."""
        end = end.copy()
        for _ in range(int(end.sum()) - samples):
            due = np.where(end > start, end / self.weights, -1.0)
            end[len(due) - 1 - int(np.argmax(due[::-1]))] -= 1  # of equals the last, which _run takes last
        return end


def _run(weights: np.ndarray, first: int, counts: np.ndarray, out: np.ndarray | None) -> None:
    """Runs blocks first, first + 1, ... side by side; `counts` [blocks, sources] goes from start to end.

    `out` [blocks, _BLOCK] takes the sources chosen.
    """
    lanes = np.arange(len(counts))
    now = (first + lanes) * _BLOCK
    for step in range(_BLOCK):
        allowed = counts < weights * (now + (step + 1))[:, None]
        chosen = np.where(allowed, (counts + 1) / weights, np.inf).argmin(axis=1)
        counts[lanes, chosen] += allowed[lanes, chosen]
        if out is not None:
            out[:, step] = chosen


@dataclass(frozen=True)
class Phase:
    """From global sample `first` on the sources have these weights; 0 for a source that rests."""

    first: int
    weights: tuple[float, ...]


class Blend:
    """A stream of samples from several datasets; itself a SampleSource.

    Global sample n is sample k of dataset i, where k counts the samples that i gave before n, over all
    phases: a change of the weights takes no source back. The datasets go on into their next epochs by
    themselves.
    """

    def __init__(self, datasets: Sequence[SampleSource], *phases: Phase) -> None:
        self.datasets, self.phases = list(datasets), phases
        lengths = sorted({dataset.sequence_length for dataset in datasets})
        if len(lengths) > 1:
            raise DataError(f"the datasets of a blend have sequence lengths {lengths}, must be one")
        self.sequence_length = lengths[0]
        self.padded = any(getattr(dataset, "padded", False) for dataset in datasets)
        self._parts: list[tuple[np.ndarray, Mixture]] = []  # sources of a phase, and their mixture
        for phase in phases:
            if len(datasets) != len(phase.weights):
                raise DataError(
                    f"{len(phase.weights)} blend weights for {len(datasets)} datasets, must be as many"
                )
            used = [i for i, weight in enumerate(phase.weights) if weight != 0]
            self._parts.append((np.array(used, int), Mixture([phase.weights[i] for i in used])))
        firsts = [phase.first for phase in phases]
        if firsts[:1] != [0] or any(a >= b for a, b in zip(firsts, firsts[1:], strict=False)):
            raise DataError(f"changes of the blend at samples {firsts[1:]}: must be above 0 and rise")
        self._before = [np.zeros(len(datasets), np.int64)]  # samples given before each phase
        for phase in phases[1:]:
            self._before.append(self.counts(phase.first))

    def counts(self, samples: int) -> np.ndarray:
        """i64 [datasets]: how many of the first `samples` samples each dataset gives."""
        number = self._phase(max(0, samples - 1))
        used, mixture = self._parts[number]
        out = self._before[number].copy()
        out[used] += mixture.counts(samples - self.phases[number].first)
        return out

    def expected(self, samples: int) -> np.ndarray:
        """f8 [datasets]: the shares of the first `samples` samples; `counts` is within 1 a phase of them."""
        ends = [phase.first for phase in self.phases[1:]] + [samples]
        out = np.zeros(len(self.datasets))
        for phase, end, (used, mixture) in zip(self.phases, ends, self._parts, strict=True):
            out[used] += mixture.weights * max(0, min(end, samples) - phase.first)
        return out

    def _phase(self, sample: int) -> int:
        """The phase of a sample, among those whose beginnings are counted."""
        known = self.phases[: len(self._before)]
        return max(number for number, phase in enumerate(known) if phase.first <= sample)

    def locate(self, sample: int) -> tuple[int, int]:
        """(dataset, number of the sample within the dataset) of a global sample."""
        if sample < 0:
            raise IndexError(f"sample {sample}, must be >= 0")
        number = self._phase(sample)
        used, mixture = self._parts[number]
        part, k = mixture.locate(sample - self.phases[number].first)
        return int(used[part]), int(self._before[number][used[part]]) + k

    def __getitem__(self, sample: int) -> np.ndarray:
        source, number = self.locate(sample)
        return self.datasets[source][number]

    def segments(self, sample: int) -> list[tuple[int, int, int]]:
        """The pieces of a sample; documents are numbered within its dataset."""
        source, number = self.locate(sample)
        return self.datasets[source].segments(number)
