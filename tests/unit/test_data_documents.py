"""Documents within a row: positions, ids, loss at their ends, padding."""

from __future__ import annotations

import numpy as np
import pytest

from megnorm.data.batches import RowRules, batch_digest, evaluation_batches, micro_batches, part_of
from megnorm.data.blend import Blend, Phase
from megnorm.data.documents import document_edges, row_documents

S = 8


class Pieces:
    """Sample n has pieces of lengths that depend on n; padded where they are fewer than S + 1 tokens."""

    sequence_length = S

    def __init__(self, padded: bool) -> None:
        self.padded = padded

    def segments(self, sample: int) -> list[tuple[int, int, int]]:
        cuts = [[9], [4, 5], [1, 1, 7], [2, 3, 4]] if not self.padded else [[9], [3, 2], [1], [8]]
        return [(k, 0, n) for k, n in enumerate(cuts[sample % 4])]

    def __getitem__(self, sample: int) -> np.ndarray:
        out = np.zeros(S + 1, np.int64)
        total = sum(n for _, _, n in self.segments(sample))
        out[:total] = 1 + np.arange(total)
        return out


def test_a_row_by_hand() -> None:
    row = row_documents([(7, 5, 3), (2, 0, 2), (9, 0, 4)], S)
    assert row.positions.tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert row.documents.tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert row.targets.all()
    assert np.flatnonzero(row.ends).tolist() == [2, 4]  # the labels there begin another document


def test_a_padded_row_by_hand() -> None:
    row = row_documents([(0, 0, 3), (1, 0, 2)], S)
    assert row.documents.tolist() == [0, 0, 0, 1, 1, -1, -1, -1]
    assert np.flatnonzero(row.targets).tolist() == [0, 1, 2, 3]  # the label of place 4 is padding
    assert np.flatnonzero(row.ends).tolist() == [2]


def test_edges_of_a_batch() -> None:
    documents = np.array([[0, 0, 1, 1], [0, 0, 0, 0], [0, 1, 2, 2]], np.int32)
    assert document_edges(documents).tolist() == [0, 2, 4, 8, 9, 10, 12]
    assert document_edges(documents).dtype == np.int32


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("mask_ends", [False, True])
@pytest.mark.parametrize(("micro", "ranks"), [(4, 1), (1, 1), (2, 2), (1, 4)])
def test_weights_are_a_mean_over_the_targets_that_count(padded, mask_ends, micro, ranks) -> None:
    dataset, rules = Pieces(padded), RowRules(mask_ends=mask_ends)
    expected, count = 0.0, 0
    for n in range(4):
        about = row_documents(dataset.segments(n), S)
        counts = about.targets & ~(about.ends & mask_ends)
        expected += float(dataset[n][1:][counts].sum())
        count += int(counts.sum())
    for make in (
        lambda r: micro_batches(dataset, 0, 4, micro, r, ranks, rules),
        lambda r: evaluation_batches(dataset, 4, micro, r, ranks, rules),
    ):
        losses = [np.mean([np.sum(b.weights * b.labels) for b in make(rank)]) for rank in range(ranks)]
        assert np.mean(losses) == pytest.approx(expected / count, rel=1e-6)
    assert (count < 4 * S) == (padded or mask_ends)


def test_batches_say_where_documents_are_when_asked() -> None:
    dataset = Pieces(False)
    plain = micro_batches(dataset, 0, 4, 4, 0, 1)[0]
    assert plain.positions is None and plain.documents is None
    both = RowRules(mask_documents=True, reset_positions=True)
    batch = micro_batches(dataset, 0, 4, 4, 0, 1, both)[0]
    for n in range(4):
        about = row_documents(dataset.segments(n), S)
        assert batch.positions[n].tolist() == about.positions.tolist()
        assert batch.documents[n].tolist() == about.documents.tolist()
    part = part_of(batch, 1, 2)
    assert part.positions.tolist() == batch.positions[:, 4:].tolist()
    assert part.documents.tolist() == batch.documents.tolist()  # of whole rows
    beyond = evaluation_batches(dataset, 3, 4, 0, 1, both)[0]
    assert beyond.positions[3].tolist() == list(range(S)) and not beyond.weights[3].any()


@pytest.mark.parametrize(
    "asked", [{"mark_padding": True}, {"reset_positions": True}, {"mask_documents": True, "mark_padding": True}]
)
def test_padding_is_negative_whatever_is_asked_for(asked) -> None:
    """And nothing else is; what isn't asked for is that of one document with positions of the row."""
    dataset, rules = Pieces(True), RowRules(**asked)
    batch = micro_batches(dataset, 0, 4, 4, 0, 1, rules)[0]
    for n, present in enumerate((9, 5, 1, 8)):
        about = row_documents(dataset.segments(n), S)
        assert ((batch.documents[n] < 0) == (np.arange(S) >= present)).all()
        own = about.documents if rules.mask_documents else np.zeros(S)
        assert (batch.documents[n] == own)[:present].all()
        assert batch.positions[n].tolist() == (about.positions if rules.reset_positions else np.arange(S)).tolist()


def test_a_blend_keeps_the_pieces_of_its_sources() -> None:
    blend = Blend([Pieces(False), Pieces(True)], Phase(0, (1.0, 1.0)))
    assert blend.padded
    assert blend.segments(3) == blend.datasets[blend.locate(3)[0]].segments(blend.locate(3)[1])


def test_the_same_stream_whatever_the_ranks() -> None:
    """DP 1, 2 and 4 see the same global batch at each step; its digest says so."""
    dataset = Pieces(False)
    for step in range(3):
        digests = set()
        for ranks in (1, 2, 4):
            rows = [b.rows for r in range(ranks) for b in micro_batches(dataset, 4 * step, 4, 1, r, ranks)]
            digests.add(tuple(sorted(map(tuple, np.concatenate(rows).tolist()))))
        assert len(digests) == 1
    assert batch_digest(dataset, 0, 4) != batch_digest(dataset, 1, 3)
