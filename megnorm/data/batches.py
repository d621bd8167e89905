"""Batches of one data-parallel rank, with token weights that make any mean of means a mean over tokens.

b = rows of a micro batch, s = sequence length.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megnorm.data.blend import SampleSource
from megnorm.data.documents import RowDocuments, row_documents
from megnorm.data.errors import DataError

ValidMask = Callable[[np.ndarray], np.ndarray]  # labels i64 [..., s] -> bool [..., s]


@dataclass(frozen=True)
class Batch:
    """One micro batch of one rank.

    tokens i64 [b, s]; labels i64 [b, s], the tokens one place further on; weights f32 [b, s]: the loss to
    minimise is the mean over micro batches and data-parallel ranks of sum(weights * cross entropy).
    Where documents are asked for: positions i64 [b, s], counted from the beginning of the row or of each
    document within it; documents i32 [b, s], equal for tokens that may see each other and only for these, negative
    for padding and only for it, of whole rows even where the others are a part.
    """

    tokens: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    positions: np.ndarray | None = None
    documents: np.ndarray | None = None

    @property
    def rows(self) -> np.ndarray:
        """The samples [b, s + 1] that tokens and labels were cut from."""
        return np.concatenate((self.tokens, self.labels[:, -1:]), 1)


def part_of(batch: Batch, part: int, parts: int) -> Batch:
    """Part number ``part`` of the sequences, cut into ``parts`` (context parallelism); the weights make up for
    the mean being taken over as many ranks more."""
    width = batch.tokens.shape[1] // parts
    columns = slice(part * width, (part + 1) * width)
    positions = None if batch.positions is None else batch.positions[:, columns].copy()
    return Batch(batch.tokens[:, columns].copy(), batch.labels[:, columns].copy(),
                 batch.weights[:, columns] * np.float32(parts), positions, batch.documents)


def every_token(labels: np.ndarray) -> np.ndarray:
    """The mask under which every target counts."""
    return np.ones(labels.shape, bool)


@dataclass(frozen=True)
class RowRules:
    """What counts as a target, and what is said of documents.

    valid_mask: which labels count. mask_ends: no loss where the label belongs to another document than the
    input (Megatron's --eod-mask-loss). mask_documents: tokens see those of their own document only (Megatron's
    --reset-attention-mask). reset_positions: positions count from the beginning of each document (Megatron's
    --reset-position-ids). mark_padding: batches say where padding is, whatever else is asked for. Padding never
    counts.
    """

    valid_mask: ValidMask = every_token
    mask_ends: bool = False
    mask_documents: bool = False
    reset_positions: bool = False
    mark_padding: bool = False

    @property
    def documents(self) -> bool:
        """Whether batches say anything of documents."""
        return self.mask_documents or self.reset_positions or self.mark_padding


PLAIN = RowRules()


def micro_batches(
    dataset: SampleSource,
    first_sample: int,
    global_batch: int,
    micro_batch: int,
    dp_rank: int,
    dp_size: int,
    rules: RowRules = PLAIN,
) -> list[Batch]:
    """The micro batches of a rank for one optimizer step, one for each accumulation step.

    The global batch is the samples first_sample .. first_sample + global_batch - 1 for every layout. Rank r
    takes micro batch a * dp_size + r in accumulation step a. Without valid targets all weights are 0.
    """
    width = micro_batch * dp_size
    if global_batch < 1 or micro_batch < 1 or global_batch % width:
        raise DataError(
            f"global batch {global_batch} must be a multiple of micro batch {micro_batch} x {dp_size} "
            f"data-parallel ranks = {width}"
        )
    return _share(dataset, first_sample, global_batch, micro_batch, dp_rank, dp_size, rules)


def evaluation_batches(
    dataset: SampleSource,
    samples: int,
    micro_batch: int,
    dp_rank: int,
    dp_size: int,
    rules: RowRules = PLAIN,
) -> list[Batch]:
    """The micro batches of a rank for the samples 0 .. samples - 1, of equal number and shape on all ranks.

    Rows beyond the last sample are zeros with weight 0. The mean over micro batches and ranks of
    sum(weights * cross entropy) is the mean over the valid targets.
    """
    if samples < 1 or micro_batch < 1:
        raise DataError(f"evaluation over {samples} samples, micro batch {micro_batch}: both must be >= 1")
    return _share(dataset, 0, samples, micro_batch, dp_rank, dp_size, rules)


def _share(
    dataset: SampleSource,
    first: int,
    samples: int,
    micro_batch: int,
    dp_rank: int,
    dp_size: int,
    rules: RowRules,
) -> list[Batch]:
    assert 0 <= dp_rank < dp_size
    steps = -(-samples // (micro_batch * dp_size))
    # Every rank counts for itself, so that nothing needs to be communicated.
    valid = _count_valid(dataset, first, samples, rules)
    scale = steps * dp_size / valid if valid else 0.0
    batches = []
    for step in range(steps):
        start = (step * dp_size + dp_rank) * micro_batch
        present = range(first + start, first + max(start, min(start + micro_batch, samples)))
        batches.append(_batch(dataset, present, micro_batch, rules, scale))
    return batches


def _batch(dataset: SampleSource, samples: range, rows: int, rules: RowRules, scale: float) -> Batch:
    """The samples as the first rows of a batch, their valid targets weighing `scale`."""
    shape = (rows, dataset.sequence_length)
    sample_rows = np.zeros((rows, shape[1] + 1), np.int64)
    weights = np.zeros(shape, np.float32)
    positions = np.tile(np.arange(shape[1]), (rows, 1)) if rules.documents else None
    documents = np.zeros(shape, np.int32) if rules.documents else None
    for row, sample in enumerate(samples):
        sample_rows[row] = dataset[sample]
        about = _documents(dataset, sample, rules)
        weights[row] = _valid(sample_rows[row, 1:], about, rules) * scale
        if rules.reset_positions:
            positions[row] = about.positions
        if rules.documents:
            documents[row] = about.documents if rules.mask_documents else np.minimum(about.documents, 0)
    return Batch(sample_rows[:, :-1].copy(), sample_rows[:, 1:].copy(), weights, positions, documents)


def _documents(dataset: SampleSource, sample: int, rules: RowRules) -> RowDocuments | None:
    if not (rules.documents or rules.mask_ends or getattr(dataset, "padded", False)):
        return None
    return row_documents(dataset.segments(sample), dataset.sequence_length)


def _valid(labels: np.ndarray, about: RowDocuments | None, rules: RowRules) -> np.ndarray:
    """Which targets of a row count, bool [s]."""
    valid = rules.valid_mask(labels)
    if about is not None:
        valid = valid & about.targets
        if rules.mask_ends:
            valid &= ~about.ends
    return valid


def _count_valid(dataset: SampleSource, first: int, samples: int, rules: RowRules) -> int:
    """Valid targets of the samples first .. first + samples - 1."""
    total = 0
    for sample in range(first, first + samples):
        about = _documents(dataset, sample, rules)
        if about is None and rules.valid_mask is every_token:
            return samples * dataset.sequence_length
        # The tokens themselves are read only where the rule looks at them.
        blind = rules.valid_mask is every_token
        labels = np.zeros(dataset.sequence_length, np.int64) if blind else dataset[sample][1:]
        total += int(np.count_nonzero(_valid(labels, about, rules)))
    return total


def rows_digest(rows: np.ndarray) -> np.ndarray:
    """i64 [2]: sums of a 64-bit hash's halves over rows of tokens [n, s + 1]. Sums of ranks' digests are the
    digest of all their rows, in whatever order they were spread."""
    hashes = [hashlib.blake2b(np.ascontiguousarray(row, "<i8").data, digest_size=8).digest() for row in rows]
    return np.frombuffer(b"".join(hashes), "<u4").reshape(-1, 2).astype(np.int64).sum(0)


def digest_text(total: np.ndarray) -> str:
    """The sum of all ranks' digests as 16 hex digits."""
    return "".join(f"{int(half) % 2**32:08x}" for half in total)


def batch_digest(dataset: SampleSource, first_sample: int, global_batch: int) -> str:
    """16 hex digits of the samples of a global batch: equal for every layout."""
    return digest_text(rows_digest(np.stack([dataset[first_sample + i] for i in range(global_batch)])))
