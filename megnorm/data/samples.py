"""Which tokens are sample n: a pure function of (lengths, documents, sequence length, seed, name, n)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from megnorm.data.errors import DataError
from megnorm.data.index_cache import IndexCache, array_digest
from megnorm.data.indexed import IndexedDataset
from megnorm.data.lengths import document_lengths
from megnorm.data.seeds import derive_key, permutation

# Token positions are kept for every 256th document only; the rest is summed when asked for.
_STRIDE = 256
_EPOCHS_KEPT = 2

Segment = tuple[int, int, int]  # document, offset in it, tokens


class TokenOrder:
    """Documents one behind the other in some order.

    `lengths` i32 or i64 by document; `order` numbers of documents, None for as they stand; `coarse` i64, the
    tokens before each _STRIDE-th place of the order.
    """

    def __init__(self, lengths: np.ndarray, order: np.ndarray | None, coarse: np.ndarray) -> None:
        self._lengths, self._order, self._coarse = lengths, order, coarse

    @staticmethod
    def coarse_of(lengths: np.ndarray, order: np.ndarray | None) -> np.ndarray:
        """`coarse` of an order."""
        count = len(lengths) if order is None else len(order)
        coarse = np.zeros(-(-count // _STRIDE) + 1, np.int64)
        block = _STRIDE << 12
        for a in range(0, count, block):
            part = lengths[a : a + block] if order is None else lengths[order[a : a + block]]
            starts = np.arange(0, len(part), _STRIDE)
            g = a // _STRIDE
            coarse[g + 1 : g + 1 + len(starts)] = np.add.reduceat(part, starts, dtype=np.int64)
        return np.cumsum(coarse, out=coarse)

    def segments(self, position: int, need: int) -> list[Segment]:
        """(document, offset, tokens) of `need` tokens from a position on."""
        group = int(np.searchsorted(self._coarse, position, side="right")) - 1
        offset = position - int(self._coarse[group])
        place, pieces = group * _STRIDE, []
        while need > 0:
            order = None if self._order is None else self._order[place : place + _STRIDE]
            lengths = self._lengths[place : place + _STRIDE] if order is None else self._lengths[order]
            lengths = lengths.astype(np.int64)
            ends = np.cumsum(lengths)
            i = int(np.searchsorted(ends, offset, side="right"))
            start = offset - int(ends[i] - lengths[i]) if i < len(ends) else 0
            while i < len(ends) and need > 0:
                take = min(int(lengths[i]) - start, need)
                if take > 0:
                    pieces.append((place + i if order is None else int(order[i]), start, take))
                need, start, i = need - take, 0, i + 1
            offset, place = max(0, offset - int(ends[-1])), place + _STRIDE
        return pieces


class SampleOrder(Protocol):
    """Which tokens are sample n.

    `segments` numbers documents (`by_sequence`: sequences) in the dataset; their tokens are
    sequence_length + 1 in all, or fewer where `padded`. `num_samples` None: there is no last one.
    """

    sequence_length: int
    samples_per_epoch: int
    num_samples: int | None
    by_sequence: bool
    padded: bool

    def segments(self, sample: int) -> list[Segment]: ...


@dataclass(frozen=True)
class _Epoch:
    tokens: TokenOrder
    samples: np.ndarray | None  # order of the epoch's samples; None: as they stand


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
        cache: where the orders are kept.

    Raises DataError when the split has too few tokens for one sample.
    """

    num_samples = None
    by_sequence = padded = False

    def __init__(
        self,
        lengths: np.ndarray,
        documents: np.ndarray,
        document_range: tuple[int, int],
        sequence_length: int,
        seed: int = 0,
        name: str = "",
        shuffle: bool = True,
        cache: IndexCache | None = None,
    ) -> None:
        first, last = document_range
        if not 0 <= first <= last <= len(documents) - 1:
            raise DataError(f"documents {first} to {last} of {name or 'a dataset'} with {len(documents) - 1}")
        check_sequence_length(sequence_length)
        self.first_document, self.num_documents = first, last - first
        self.sequence_length, self.seed, self.name, self.shuffle = sequence_length, seed, name, shuffle
        self._lengths = document_lengths(lengths, documents, first, last)
        self._cache = cache or IndexCache(None)
        self._digest: str | None = None
        self.num_tokens = int(self._lengths.sum(dtype=np.int64))
        self.samples_per_epoch = max(0, self.num_tokens - 1) // sequence_length
        if self.samples_per_epoch == 0:
            raise too_few_tokens(name, self.num_documents, self.num_tokens, sequence_length)
        self._epochs: dict[int, _Epoch] = {}

    def _epoch(self, epoch: int) -> _Epoch:
        if epoch not in self._epochs:
            while len(self._epochs) >= _EPOCHS_KEPT:
                self._epochs.pop(next(iter(self._epochs)))
            self._epochs[epoch] = self._build_epoch(epoch)
        return self._epochs[epoch]

    def _build_epoch(self, epoch: int) -> _Epoch:
        if not self.shuffle:
            if self._epochs:  # every epoch is the same
                return next(iter(self._epochs.values()))
            return _Epoch(TokenOrder(self._lengths, None, TokenOrder.coarse_of(self._lengths, None)), None)
        order = self._permutation("documents", epoch, self.num_documents)
        key = {"lengths": self._lengths_digest(), "order": self._key("documents", epoch), "stride": _STRIDE}
        coarse = self._cache.get(key, lambda: TokenOrder.coarse_of(self._lengths, order))
        samples = self._permutation("samples", epoch, self.samples_per_epoch)
        return _Epoch(TokenOrder(self._lengths, order, coarse), samples)

    def _permutation(self, what: str, epoch: int, n: int) -> np.ndarray:
        key = self._key(what, epoch)
        return self._cache.get({"permutation": n, "key": key}, lambda: permutation(n, int(key, 16)))

    def _key(self, what: str, epoch: int) -> str:
        return hex(derive_key(self.seed, self.name, what, epoch))

    def _lengths_digest(self) -> str:
        if self._digest is None:
            self._digest = array_digest(self._lengths)
        return self._digest

    def position(self, sample: int) -> tuple[int, int]:
        """(epoch, first token) of a sample, counted in the epoch's order of documents."""
        if sample < 0:
            raise IndexError(f"sample {sample}, must be >= 0")
        epoch, k = divmod(int(sample), self.samples_per_epoch)
        order = self._epoch(epoch).samples
        return epoch, (k if order is None else int(order[k])) * self.sequence_length

    def segments(self, sample: int) -> list[Segment]:
        """(document, offset in it, tokens) of each piece of a sample; `sequence_length` + 1 tokens in all.

        Documents are numbered in the dataset, not in the split.
        """
        epoch, position = self.position(sample)
        pieces = self._epoch(epoch).tokens.segments(position, self.sequence_length + 1)
        return [(self.first_document + document, offset, take) for document, offset, take in pieces]


def check_sequence_length(sequence_length: int) -> None:
    """Raises DataError for a sequence without a token."""
    if sequence_length < 1:
        raise DataError(f"sequence length {sequence_length}, must be at least 1")


def too_few_tokens(name: str, documents: int, tokens: int, sequence_length: int) -> DataError:
    """The error of a split without a single sample."""
    return DataError(
        f"{name or 'dataset'}: {documents} documents with {tokens} tokens give no sample of "
        f"{sequence_length} + 1 tokens; take a shorter sequence or a larger split"
    )


class GPTDataset:
    """Samples of an indexed dataset: `dataset[n]` is i64 [sequence_length + 1], for every n >= 0.

    Where the order is `padded`, zeros stand behind the tokens. With `vocab_size`, a token id outside
    0..vocab_size-1 raises DataError.
    """

    def __init__(self, dataset: IndexedDataset, order: SampleOrder, vocab_size: int | None = None) -> None:
        if dataset.dtype.kind not in "iu":
            raise DataError(f"{dataset.prefix}.bin holds {dataset.dtype}, token ids must be integers")
        self.dataset, self.map, self.vocab_size = dataset, order, vocab_size
        self.sequence_length, self.samples_per_epoch = order.sequence_length, order.samples_per_epoch
        self.padded = order.padded
        self._read = dataset.read if order.by_sequence else dataset.read_document

    def segments(self, sample: int) -> list[Segment]:
        """(document, offset in it, tokens) of each piece of a sample."""
        return self.map.segments(sample)

    def __getitem__(self, sample: int) -> np.ndarray:
        out = np.zeros(self.sequence_length + 1, np.int64)
        at = 0
        for document, offset, length in self.map.segments(sample):
            out[at : at + length] = self._read(document, offset, length)
            at += length
        if self.vocab_size is not None and (out.min() < 0 or out.max() >= self.vocab_size):
            wrong = int(out[(out < 0) | (out >= self.vocab_size)][0])
            raise DataError(
                f"{self.dataset.prefix}.bin: token id {wrong} in sample {sample}, but the vocabulary has "
                f"{self.vocab_size} entries; was another tokenizer used?"
            )
        return out


def gpt_dataset(
    dataset: IndexedDataset,
    document_range: tuple[int, int] | None = None,
    sequence_length: int = 1024,
    vocab_size: int | None = None,
    **more: Any,
) -> GPTDataset:
    """Samples of a dataset in the default order. Arguments: SampleMap's; `document_range` None for all."""
    documents = document_range or (0, dataset.num_documents)
    order = SampleMap(dataset.lengths, dataset.documents, documents, sequence_length, **more)
    return GPTDataset(dataset, order, vocab_size)
