"""Expert parallelism: each token's copies travel to the ranks that hold their experts, and back.

The ranks of a group are neighbours among the data-parallel ranks: each works on other tokens. An expert's
gradient therefore already holds the tokens of all of them, where another parameter's is a mean over them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megnorm.parallel.sharding import ExpertSlice

Experts = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Route:
    """sent, received: rows to and from each rank. order: of the received rows, to have them by expert; back:
    its inverse."""

    sent: list[int]
    received: list[int]
    order: Tensor
    back: Tensor
    group: dist.ProcessGroup

    def dispatch(self, rows: Tensor) -> Tensor:
        """Rows that are here to the ranks of their experts."""
        return self._exchange(rows.contiguous(), self.sent, self.received).index_select(0, self.order)

    def combine(self, rows: Tensor) -> Tensor:
        """The inverse of ``dispatch``, and its transpose."""
        return self._exchange(rows.index_select(0, self.back), self.received, self.sent)

    def _exchange(self, rows: Tensor, out: list[int], back: list[int]) -> Tensor:
        arrived = rows.new_empty((sum(back), *rows.shape[1:]))
        dist.all_to_all_single(arrived, rows, back, out, group=self.group)
        return arrived


class AllExperts:
    """A group of one rank, which holds every expert."""

    rank = 0
    size = 1

    @property
    def slice(self) -> ExpertSlice:
        """Which experts this rank holds, for the metadata of their parameters."""
        return ExpertSlice(self.rank, self.size)

    def around(self, experts: Experts) -> Experts:
        """Experts as a function of the rows that are here, whoever holds them.

        experts: rows [m, d] sorted by expert, and the number of rows of each expert that is here [n / size]
        -> [m, d]. Returned: rows [r, d] sorted by expert, and the number of rows of each of all [n] -> [r, d].
        """
        return experts


class ExpertParallel(AllExperts):
    """A group of several ranks; rank i holds the i-th slice of the experts."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def around(self, experts: Experts) -> Experts:
        def exchanged(rows: Tensor, counts: Tensor) -> Tensor:
            route, here = self.route(counts)
            arrived = _Exchange.apply(rows, route.dispatch, route.combine)
            return _Exchange.apply(experts(arrived, here), route.combine, route.dispatch)
        return exchanged

    def route(self, counts: Tensor) -> tuple[Route, Tensor]:
        """The way of rows sorted by expert, and the number of rows that arrive for each expert here."""
        sent = counts.view(self.size, -1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent.contiguous(), group=self.group)
        # They arrive by rank and then by expert; the experts want them by expert.
        expert = torch.arange(sent.shape[1], device=counts.device).repeat(self.size)
        order = expert.repeat_interleave(received.flatten()).argsort(stable=True)
        route = Route(sent.sum(1).tolist(), received.sum(1).tolist(), order, order.argsort(), self.group)
        return route, received.sum(0)


class _Exchange(torch.autograd.Function):
    """There, and the gradient back: each is the other's transpose."""

    @staticmethod
    def forward(ctx, rows, there, back):
        ctx.back = back
        return there(rows)

    @staticmethod
    def backward(ctx, grad):
        return ctx.back(grad), None, None
