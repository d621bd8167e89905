"""The way of rows to the ranks of their experts and back: values and gradients of all experts on one rank, also
for ranks and experts that get no row."""

from unittest import mock

import pytest
import torch
from test_parallel_layers import no_default_group

from megnorm.parallel.expert import AllExperts, Route
from megnorm.parallel.groups import make_groups
from megnorm.plan.layout import Layout
from megnorm.testing.ranks import run_ranks

EXPERTS, WIDTH = 8, 3
LOADS = {
    "even": [[2] * EXPERTS] * 4,
    "uneven": [[0, 5, 1, 0, 2, 0, 0, 3], [4, 0, 0, 0, 0, 0, 0, 1], [0, 0, 0, 7, 0, 1, 1, 0], [1] * EXPERTS],
    "one expert": [[0, 0, 0, 0, 0, 6, 0, 0]] * 4,
}


def rows_of(rank, counts):
    stream = torch.Generator().manual_seed(rank)
    return torch.randn(sum(counts), WIDTH, generator=stream, dtype=torch.float64)


def weights_of(experts):
    """[n, d, d], a function of the expert's number."""
    return torch.stack([torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(100 + e), dtype=torch.float64)
                        for e in experts])


def run(ep, rank, counts, first, number):
    """y = tanh(row W_e) W_e of a rank's rows, and gradients of sum(y * cosine of its place) for rows and weights."""
    rows, weights = rows_of(rank, counts).requires_grad_(), weights_of(range(first, first + number)).requires_grad_()

    def experts(rows, counts):
        used = weights.repeat_interleave(counts, 0)
        return torch.einsum("md,mdf->mf", torch.einsum("md,mdf->mf", rows, used).tanh(), used)

    y = ep.around(experts)(rows, torch.tensor(counts))
    (y * torch.arange(y.numel(), dtype=y.dtype).view_as(y).cos()).sum().backward()
    return y.detach(), rows.grad, weights.grad


def exchanged(layout, loads, fault=""):
    groups = make_groups(layout, torch.device("cpu"))
    number = EXPERTS // groups.ep.size
    faults = {"": mock.patch.object(Route, "unused", None, create=True),
              "order forgotten": mock.patch.object(Route, "dispatch", lambda self, rows: self._exchange(
                  rows, self.sent, self.received)),
              "way back forgotten": mock.patch.object(Route, "combine", lambda self, rows: self._exchange(
                  rows, self.received, self.sent))}
    with no_default_group(), faults[fault]:
        return run(groups.ep, groups.rank, loads[groups.rank], groups.ep.rank * number, number)


def differences(layout, loads, fault=""):
    """Largest errors of values, gradients of rows, gradients of weights against every rank on its own."""
    ranks = run_ranks(exchanged, layout.world, layout, loads, fault)
    right = [run(AllExperts(), rank, loads[rank], 0, EXPERTS) for rank in range(layout.world)]
    whole = [sum(right[rank][2] for rank in members) for members in layout.neighbours(layout.ep)]
    number, errors = EXPERTS // layout.ep, [0.0, 0.0, 0.0]
    for part, members in enumerate(layout.neighbours(layout.ep)):
        for place, rank in enumerate(members):
            expected = (*right[rank][:2], whole[part][place * number:(place + 1) * number])
            errors = [max(e, float((a - b).abs().max())) for e, a, b in zip(errors, ranks[rank], expected, strict=True)]
    return errors


@pytest.mark.parametrize("ep", [2, 4])
@pytest.mark.parametrize("loads", LOADS)
def test_equals_all_experts_on_one_rank(ep, loads):
    assert max(differences(Layout(pp=1, dp=4, tp=1, ep=ep), LOADS[loads])) < 1e-12


@pytest.mark.parametrize(("fault", "wrong"), [("order forgotten", 0), ("way back forgotten", 1)])
def test_a_wrong_order_is_found(fault, wrong):
    assert differences(Layout(pp=1, dp=4, tp=1, ep=2), LOADS["uneven"], fault)[wrong] > 0.1
