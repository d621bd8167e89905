"""Which experts a token goes to; b batch, s sequence, d hidden, n experts, k experts of a token.

Beside the cross entropy each layer trains two losses, over the T tokens of one micro batch, on whichever ranks they
are:

    aux      = n sum_e f_e P_e, f_e: share of expert e in the k T choices, P_e: mean of the scores, normalised to
               sum 1 (arXiv:2101.03961, eq. 4; 1 for even loads)
    sequence = the same over the tokens of each sequence, mean over sequences (arXiv:2412.19437, eq. 17); with bias too
    z        = mean of logsumexp(logits)^2 (arXiv:2202.08906, eq. 5)

Their values are means over the layers with experts and over the micro batches of the global batch. A global batch
is cut into the same micro batches on every layout, so that none of this depends on it. Padding is no token here: it
goes to experts, but counts neither in the losses nor in what is recorded.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megnorm.model.common import Common
from megnorm.model.documents import Documents
from megnorm.model.init import BlockInit
from megnorm.model.kernels import wide_dtype
from megnorm.model.routing import Routing, Seen
from megnorm.parallel.sharding import keep_state

LOG_SCORES: dict[str, Callable[[Tensor], Tensor]] = {"softmax": lambda x: F.log_softmax(x, -1), "sigmoid": F.logsigmoid}


class Router(nn.Module):
    """x [b, s, d] -> experts of each token and their factors, [b, s, k] each, in fp32 at least.

    The first of equal scores wins. What is dropped has expert number n. Scores are kept as logarithms, which stay
    finite where all experts' sigmoids vanish. What one expert takes of a row under ``capacity`` follows from the row's
    length, padding and all: no token's way depends on what stands behind it.
    """

    def __init__(self, name: str, layer: int, common: Common, init: BlockInit):
        super().__init__()
        self.layer, self.tp, self.parts, self.routing = layer, common.tp, common.parts, common.routing
        self.moe, self.loss_share = common.model.moe, 1 / len(common.model.moe_layers)
        self.log_scores = LOG_SCORES[self.moe.router]
        shape = (self.moe.experts, common.model.hidden)
        self.weight = common.tp.on_stream(f"{name}.weight", shape, role="matrix", init=init.router)
        if self.moe.balance == "bias":
            keep_state(self, "balance", f"{name}.balance", torch.zeros(self.moe.experts))
        else:
            self.balance = 0.0
        common.routing.routers[layer] = self

    def forward(self, x: Tensor, documents: Documents | None = None) -> tuple[Tensor, Tensor]:
        wide = wide_dtype(x)
        logits = F.linear(x.to(wide), self.tp.shared(self.weight).to(wide))
        log_scores = self.log_scores(logits)
        chosen = self.choose(log_scores.detach().exp() + self.balance)
        chosen_scores = log_scores.gather(-1, chosen)
        gates = self.moe.routed_scale * (chosen_scores.softmax(-1) if self.moe.normalise_top_k else chosen_scores.exp())
        kept = self.limit(chosen) if self.moe.capacity else chosen
        loss, seen = self.losses(logits, log_scores, chosen, kept, documents)
        return kept, Beside.apply(gates, loss, seen, self.layer, self.routing)

    def choose(self, scores: Tensor) -> Tensor:
        """Of scores [b, s, n] the experts of each token, [b, s, k], among those of its best groups."""
        moe = self.moe
        if moe.top_groups < moe.groups:
            grouped = scores.unflatten(-1, (moe.groups, -1))
            best = largest(grouped.topk(2, -1).values.sum(-1), moe.top_groups)
            others = torch.ones(grouped.shape[:-1], dtype=torch.bool, device=scores.device).scatter_(-1, best, False)
            scores = grouped.masked_fill(others.unsqueeze(-1), -math.inf).flatten(-2)
        return largest(scores, moe.top_k)

    def losses(self, logits: Tensor, log_scores: Tensor, chosen: Tensor, kept: Tensor,
               documents: Documents | None = None) -> tuple[Tensor, Seen]:
        """This rank's share of the losses with their weights, and what is recorded."""
        moe, n, (b, s, _) = self.moe, self.moe.experts, chosen.shape
        rows = chosen.new_ones(b, s * self.parts.count, dtype=torch.bool) if documents is None else documents.real
        real = self.parts.own(rows).unsqueeze(-1)  # [b, s, 1]
        sets = b if moe.by_sequence else 1  # over whose tokens the loads are to be even
        tokens = rows.view(sets, -1).sum(1, keepdim=True)
        log_p = log_scores.log_softmax(-1)
        p = log_p.exp() * real
        choices = counts(chosen.masked_fill(~real, n).view(sets, -1), n)
        f = self.parts.sum(choices).to(p) / (moe.top_k * tokens)
        aux = n / sets * (f * p.view(sets, -1, n).sum(1) / tokens).sum()
        z = (logits.logsumexp(-1, keepdim=True).square() * real).sum() / tokens.sum()
        loss = self.loss_share * (moe.aux_weight * aux + moe.z_weight * z)
        return loss, Seen(choices.sum(0), (real & (kept == n)).sum(), -(p * log_p).detach().sum(), aux, z)

    def limit(self, chosen: Tensor) -> Tensor:
        """The choices with those beyond an expert's capacity in their sequence, counted from its start, as n."""
        moe, n = self.moe, self.moe.experts
        length = chosen.shape[1] * self.parts.count  # a whole number first: the same rounding on every layout
        capacity = math.ceil(moe.capacity * (moe.top_k * length) / n)
        taken = F.one_hot(chosen, n).sum(2)  # [b, s, n]
        earlier = taken.cumsum(1) - taken + self.parts.before(taken.sum(1)).unsqueeze(1)
        return chosen.masked_fill(earlier.gather(-1, chosen) >= capacity, n)

    @torch.no_grad()
    def rebalance(self, load: Tensor) -> None:
        """b_e += rate sign(mean load - load_e) (arXiv:2408.15664), after a step; load [n] sums to 1."""
        if self.moe.balance == "bias":
            self.balance += self.moe.bias_rate * torch.sign(1 / self.moe.experts - load).to(self.balance)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """A change of precision leaves the bias alone: its steps would be lost in bf16."""
        balance = self.balance
        super()._apply(fn, recurse)
        if self.moe.balance == "bias":
            self.balance = balance.to(self.balance.device)
        return self


class Beside(torch.autograd.Function):
    """The gates as they are. Their backward pass records, and starts the backward pass of the losses."""

    @staticmethod
    def forward(ctx, gates: Tensor, loss: Tensor, seen: Seen, layer: int, routing: Routing) -> Tensor:
        ctx.dtype, ctx.seen, ctx.layer, ctx.routing = loss.dtype, seen, layer, routing
        return gates.view_as(gates)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.routing.add(ctx.layer, ctx.seen)
        return grad, torch.full((), ctx.routing.loss_scale, dtype=ctx.dtype, device=grad.device), None, None, None


def largest(scores: Tensor, k: int) -> Tensor:
    """Indices of the k largest of scores [..., n], the first of equal ones."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :k].contiguous()


def counts(chosen: Tensor, n: int) -> Tensor:
    """How often each of n experts stands in each row, where n is none of them: [rows, choices] -> [rows, n]."""
    rows = torch.arange(len(chosen), device=chosen.device).unsqueeze(1)
    return torch.bincount((chosen + (n + 1) * rows).flatten(), minlength=(n + 1) * len(chosen)).view(-1, n + 1)[:, :n]
