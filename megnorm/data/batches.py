"""Batches of one data-parallel rank, with token weights that make any mean of means a mean over tokens.

b = rows of a micro batch, s = sequence length.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megnorm.data.blend import SampleSource
from megnorm.data.errors import DataError

ValidMask = Callable[[np.ndarray], np.ndarray]  # labels i64 [..., s] -> bool [..., s]


@dataclass(frozen=True)
class Batch:
    """One micro batch of one rank.

    tokens i64 [b, s]; labels i64 [b, s], the tokens one place further on; weights f32 [b, s]: the loss to
    minimise is the mean over micro batches and data-parallel ranks of sum(weights * cross entropy).
    """

    tokens: np.ndarray
    labels: np.ndarray
    weights: np.ndarray

    @property
    def rows(self) -> np.ndarray:
        """The samples [b, s + 1] that tokens and labels were cut from."""
        return np.concatenate((self.tokens, self.labels[:, -1:]), 1)


def part_of(batch: Batch, part: int, parts: int) -> Batch:
    """Part number ``part`` of the sequences, cut into ``parts`` (context parallelism); the weights make up for
    the mean being taken over as many ranks more."""
    width = batch.tokens.shape[1] // parts
    columns = slice(part * width, (part + 1) * width)
    return Batch(batch.tokens[:, columns].copy(), batch.labels[:, columns].copy(),
                 batch.weights[:, columns] * np.float32(parts))


def every_token(labels: np.ndarray) -> np.ndarray:
    """The mask under which every target counts."""
    return np.ones(labels.shape, bool)


def micro_batches(
    dataset: SampleSource,
    first_sample: int,
    global_batch: int,
    micro_batch: int,
    dp_rank: int,
    dp_size: int,
    valid_mask: ValidMask = every_token,
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
    return _share(dataset, first_sample, global_batch, micro_batch, dp_rank, dp_size, valid_mask)


def evaluation_batches(
    dataset: SampleSource,
    samples: int,
    micro_batch: int,
    dp_rank: int,
    dp_size: int,
    valid_mask: ValidMask = every_token,
) -> list[Batch]:
    """The micro batches of a rank for the samples 0 .. samples - 1, of equal number and shape on all ranks.

    Rows beyond the last sample are zeros with weight 0. The mean over micro batches and ranks of
    sum(weights * cross entropy) is the mean over the valid targets.
    """
    if samples < 1 or micro_batch < 1:
        raise DataError(f"evaluation over {samples} samples, micro batch {micro_batch}: both must be >= 1")
    return _share(dataset, 0, samples, micro_batch, dp_rank, dp_size, valid_mask)


def _share(
    dataset: SampleSource,
    first: int,
    samples: int,
    micro_batch: int,
    dp_rank: int,
    dp_size: int,
    valid_mask: ValidMask,
) -> list[Batch]:
    assert 0 <= dp_rank < dp_size
    steps = -(-samples // (micro_batch * dp_size))
    # Every rank counts for itself, so that nothing needs to be communicated.
    valid = _count_valid(dataset, first, samples, valid_mask)
    scale = steps * dp_size / valid if valid else 0.0
    batches = []
    for step in range(steps):
        start = (step * dp_size + dp_rank) * micro_batch
        rows = np.zeros((micro_batch, dataset.sequence_length + 1), np.int64)
        present = max(0, min(micro_batch, samples - start))
        for row in range(present):
            rows[row] = dataset[first + start + row]
        tokens, labels = rows[:, :-1].copy(), rows[:, 1:].copy()
        weights = (valid_mask(labels) * scale).astype(np.float32)
        weights[present:] = 0.0
        batches.append(Batch(tokens, labels, weights))
    return batches


def _count_valid(dataset: SampleSource, first: int, samples: int, valid_mask: ValidMask) -> int:
    """Valid targets of the samples first .. first + samples - 1."""
    if valid_mask is every_token:
        return samples * dataset.sequence_length
    return sum(int(np.count_nonzero(valid_mask(dataset[first + i][1:]))) for i in range(samples))


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
