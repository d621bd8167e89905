"""Megatron's order of samples, bit by bit, for runs that must follow one of Megatron's.

It depends on how many samples are asked for: all epochs but the last are shuffled together. So a run that is
made longer sees other samples from the start; the default order (SampleMap) doesn't have this.
Source: Megatron-LM, megatron/core/datasets/gpt_dataset.py and helpers.cpp (core 0.16).
"""

from __future__ import annotations

import functools

import numpy as np

from megnorm.data.errors import DataError
from megnorm.data.index_cache import IndexCache, array_digest
from megnorm.data.samples import Segment, TokenOrder, check_sequence_length, too_few_tokens

_BLOCK = 1 << 20
_PLACES = 1 << 31
_LAST_EPOCH_SHARE = 0.80  # a last epoch that is used less than this is shuffled apart


class MegatronMap:
    """Samples 0 .. num_samples - 1 over a range of sequences. Megatron calls each sequence a document.

    Args:
        lengths: i32 tokens of each sequence [N].
        sequence_range: (first, last) sequences of the split, last excluded.
        sequence_length: `s`, in tokens.
        samples: how many are asked for; there are at least as many.
        seed: Megatron's --seed, the same for every dataset.

    Attributes: `document_index` i32 [epochs * sequences], `shuffle_index` u32 or i64 [num_samples].
    Raises DataError when there are too few tokens for one sample, or too many samples for its indices.
    """

    by_sequence, padded = True, False

    def __init__(
        self,
        lengths: np.ndarray,
        sequence_range: tuple[int, int],
        sequence_length: int,
        samples: int,
        seed: int = 0,
        name: str = "",
        cache: IndexCache | None = None,
    ) -> None:
        first, last = sequence_range
        assert 0 <= first <= last <= len(lengths) and samples > 0
        check_sequence_length(sequence_length)
        self.sequence_length, self._lengths = sequence_length, lengths
        tokens = int(lengths[first:last].sum(dtype=np.int64))
        self.samples_per_epoch = max(0, tokens - 1) // sequence_length
        if self.samples_per_epoch == 0:
            raise too_few_tokens(name, last - first, tokens, sequence_length)
        self.epochs = max(1, -(-(samples * sequence_length + 1) // tokens))
        self.num_samples = (self.epochs * tokens - 1) // sequence_length
        if max(self.epochs * (last - first), self.num_samples) >= _PLACES:
            raise DataError(
                f"{name or 'dataset'}: {samples:,} samples take {self.epochs:,} epochs of {last - first:,} "
                f"sequences, more than the 2^31 places that Megatron's order has; take order=default"
            )
        before = ((self.epochs - 1) * tokens - 1) // sequence_length  # samples without the last epoch
        apart = self.epochs > 1 and samples - before < int(_LAST_EPOCH_SHARE * self.samples_per_epoch)
        cache = cache or IndexCache(None)
        key = {
            "order": "megatron",
            "range": [first, last],
            "epochs": self.epochs,
            "apart": apart,
            "seed": seed,
        }

        # One generator gives both shuffles, one after the other.
        @functools.cache
        def shuffled() -> tuple[np.ndarray, np.ndarray]:
            random = np.random.RandomState(seed)
            index = _document_index(first, last, self.epochs, apart, random)
            return index, _shuffle_index(before, self.num_samples, apart, random)

        self.document_index = cache.get({**key, "index": "documents"}, lambda: shuffled()[0])
        sizes = {"samples": [before, self.num_samples]}
        self.shuffle_index = cache.get({**key, **sizes, "index": "shuffle"}, lambda: shuffled()[1])
        shuffled.cache_clear()
        digest = {"lengths": array_digest(lengths), "index": "coarse"} if cache.keeps else {}
        coarse = cache.get({**key, **digest}, lambda: TokenOrder.coarse_of(lengths, self.document_index))
        self._tokens = TokenOrder(lengths, self.document_index, coarse)

    def segments(self, sample: int) -> list[Segment]:
        """(sequence, offset in it, tokens) of each piece of a sample; `sequence_length` + 1 tokens in all."""
        if not 0 <= sample < self.num_samples:
            raise IndexError(f"sample {sample} of {self.num_samples} in the order of Megatron")
        position = int(self.shuffle_index[sample]) * self.sequence_length
        return self._tokens.segments(position, self.sequence_length + 1)

    def sample_index(self) -> np.ndarray:
        """Megatron's sample index [num_samples + 1, 2], i32 where it fits: place in `document_index` and
        offset of each sample's first token. It follows from the lengths, so nothing here keeps it."""
        largest = max(len(self.document_index), int(self._lengths.max()))
        out = np.zeros((self.num_samples + 1, 2), np.int32 if largest <= np.iinfo(np.int32).max else np.int64)
        s, start, k = self.sequence_length, 0, 1
        for a in range(0, len(self.document_index), _BLOCK):
            lengths = self._lengths[self.document_index[a : a + _BLOCK]].astype(np.int64)
            ends = start + np.cumsum(lengths)
            stop = min(self.num_samples + 1, -(-int(ends[-1]) // s))  # samples that begin in the block
            positions = np.arange(k, stop) * s
            place = np.searchsorted(ends, positions, side="right")
            out[k:stop, 0] = a + place
            out[k:stop, 1] = positions - (ends[place] - lengths[place])
            start, k = int(ends[-1]), max(k, stop)
        return out


def _document_index(
    first: int, last: int, epochs: int, apart: bool, random: np.random.RandomState
) -> np.ndarray:
    if apart:
        most = _document_index(first, last, epochs - 1, False, random)
        return np.concatenate([most, _document_index(first, last, 1, False, random)])
    index = np.tile(np.arange(first, last, dtype=np.int32), epochs)
    random.shuffle(index)
    return index


def _shuffle_index(before: int, samples: int, apart: bool, random: np.random.RandomState) -> np.ndarray:
    dtype = np.int64 if samples >= np.iinfo(np.uint32).max - 1 else np.uint32
    parts = ((0, before), (before, samples)) if apart else ((0, samples),)
    out = np.arange(samples, dtype=dtype)
    for a, b in parts:
        random.shuffle(out[a:b])
    return out
