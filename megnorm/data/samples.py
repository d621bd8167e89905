"""Which tokens are sample n: a pure function of (lengths, documents, sequence length, seed, name, n)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megnorm.data.errors import DataError
from megnorm.data.indexed import IndexedDataset, document_lengths
from megnorm.data.seeds import derive_key, permutation

# Token positions are kept for every 256th document only; the rest is summed when asked for.
_STRIDE = 256
_EPOCHS_KEPT = 2


@dataclass(frozen=True)
class _Epoch:
    documents: np.ndarray | None  # order of the split's documents; None: as they stand
    samples: np.ndarray | None  # order of the epoch's samples; None: as they stand
    coarse: np.ndarray  # i64: tokens before each _STRIDE-th document of the order


class SampleMap:
    """Samples of `sequence_length` + 1 tokens over the documents of a split, without end.

    In epoch e the documents are shuffled by a generator seeded from (seed, name, e), put one behind the
    other, and cut at a stride of `sequence_length` into floor((tokens - 1) / sequence_length) samples (the
    last token of a sample is the first of the next: it is the last label, then an input); then the samples
    are shuffled within the epoch. Sample n lies in epoch n // samples_per_epoch, so asking for more samples
    never changes the earlier ones.

    Args:
        lengths: tokens of each sequence [N].
        documents: boundaries in sequences [D + 1].
        document_range: (first, last) documents of the split, last excluded.
        sequence_length: `s`, in tokens.
        seed, name: of the order; `name` keeps two datasets of one run apart.
        shuffle: False for validation and test: documents and samples as they stand.

    Raises DataError when the split has too few tokens for one sample.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        documents: np.ndarray,
        document_range: tuple[int, int],
        sequence_length: int,
        seed: int = 0,
        name: str = "",
        shuffle: bool = True,
    ) -> None:
        first, last = document_range
        if not 0 <= first <= last <= len(documents) - 1:
            raise DataError(f"documents {first} to {last} of {name or 'a dataset'} with {len(documents) - 1}")
        if sequence_length < 1:
            raise DataError(f"sequence length {sequence_length}, must be at least 1")
        self.first_document, self.num_documents = first, last - first
        self.sequence_length, self.seed, self.name, self.shuffle = sequence_length, seed, name, shuffle
        self._lengths = document_lengths(lengths, documents, first, last)
        self.num_tokens = int(self._lengths.sum(dtype=np.int64))
        self.samples_per_epoch = max(0, self.num_tokens - 1) // sequence_length
        if self.samples_per_epoch == 0:
            raise DataError(
                f"{name or 'dataset'}: {self.num_documents} documents with {self.num_tokens} tokens give no "
                f"sample of {sequence_length} + 1 tokens; take a shorter sequence or a larger split"
            )
        self._epochs: dict[int, _Epoch] = {}

    def _epoch(self, epoch: int) -> _Epoch:
        if epoch not in self._epochs:
            while len(self._epochs) >= _EPOCHS_KEPT:
                self._epochs.pop(next(iter(self._epochs)))
            self._epochs[epoch] = self._build_epoch(epoch)
        return self._epochs[epoch]

    def _build_epoch(self, epoch: int) -> _Epoch:
        if not self.shuffle and self._epochs:
            return next(iter(self._epochs.values()))  # every epoch is the same
        order = samples = None
        if self.shuffle:
            order = permutation(self.num_documents, derive_key(self.seed, self.name, "documents", epoch))
            samples = permutation(self.samples_per_epoch, derive_key(self.seed, self.name, "samples", epoch))
        groups = -(-self.num_documents // _STRIDE)
        coarse = np.zeros(groups + 1, np.int64)
        block = _STRIDE << 12
        for a in range(0, self.num_documents, block):
            lengths = self._in_order(order, a, a + block)
            starts = np.arange(0, len(lengths), _STRIDE)
            g = a // _STRIDE
            coarse[g + 1 : g + 1 + len(starts)] = np.add.reduceat(lengths, starts, dtype=np.int64)
        np.cumsum(coarse, out=coarse)
        return _Epoch(order, samples, coarse)

    def _in_order(self, order: np.ndarray | None, a: int, b: int) -> np.ndarray:
        """Lengths of the documents at places [a, b) of an order."""
        return self._lengths[a:b] if order is None else self._lengths[order[a:b]]

    def position(self, sample: int) -> tuple[int, int]:
        """(epoch, first token) of a sample, counted in the epoch's order of documents."""
        if sample < 0:
            raise IndexError(f"sample {sample}, must be >= 0")
        epoch, k = divmod(int(sample), self.samples_per_epoch)
        order = self._epoch(epoch).samples
        return epoch, (k if order is None else int(order[k])) * self.sequence_length

    def segments(self, sample: int) -> list[tuple[int, int, int]]:
        """(document, offset in it, tokens) of each piece of a sample; `sequence_length` + 1 tokens in all.

        Documents are numbered in the dataset, not in the split.
        """
        number, position = self.position(sample)
        epoch = self._epoch(number)
        need = self.sequence_length + 1
        group = int(np.searchsorted(epoch.coarse, position, side="right")) - 1
        offset = position - int(epoch.coarse[group])
        place, pieces = group * _STRIDE, []
        while need > 0:
            lengths = self._in_order(epoch.documents, place, place + _STRIDE).astype(np.int64)
            ends = np.cumsum(lengths)
            i = int(np.searchsorted(ends, offset, side="right"))
            start = offset - int(ends[i] - lengths[i]) if i < len(ends) else 0
            while i < len(ends) and need > 0:
                take = min(int(lengths[i]) - start, need)
                if take > 0:
                    at = place + i
                    document = at if epoch.documents is None else int(epoch.documents[at])
                    pieces.append((self.first_document + document, start, take))
                need, start, i = need - take, 0, i + 1
            offset, place = max(0, offset - int(ends[-1])), place + _STRIDE
        return pieces


class GPTDataset:
    """Samples of an indexed dataset: `dataset[n]` is i64 [sequence_length + 1], for every n >= 0.

    With `vocab_size`, a token id outside 0..vocab_size-1 raises DataError. Other arguments: see SampleMap.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        document_range: tuple[int, int] | None = None,
        sequence_length: int = 1024,
        seed: int = 0,
        name: str = "",
        shuffle: bool = True,
        vocab_size: int | None = None,
    ) -> None:
        if dataset.dtype.kind not in "iu":
            raise DataError(f"{dataset.prefix}.bin holds {dataset.dtype}, token ids must be integers")
        self.dataset, self.vocab_size = dataset, vocab_size
        documents = document_range or (0, dataset.num_documents)
        self.map = SampleMap(
            dataset.lengths, dataset.documents, documents, sequence_length, seed, name, shuffle
        )
        self.sequence_length = sequence_length
        self.samples_per_epoch = self.map.samples_per_epoch

    def __getitem__(self, sample: int) -> np.ndarray:
        out = np.empty(self.sequence_length + 1, np.int64)
        at = 0
        for document, offset, length in self.map.segments(sample):
            out[at : at + length] = self.dataset.read_document(document, offset, length)
            at += length
        if self.vocab_size is not None and (out.min() < 0 or out.max() >= self.vocab_size):
            wrong = int(out[(out < 0) | (out >= self.vocab_size)][0])
            raise DataError(
                f"{self.dataset.prefix}.bin: token id {wrong} in sample {sample}, but the vocabulary has "
                f"{self.vocab_size} entries; was another tokenizer used?"
            )
        return out
