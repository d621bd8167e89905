"""A mixture of experts where the FFN stands; b batch, s sequence, d hidden, n experts, k of a token, f inner width.

    y = sum over the chosen e of g_e down_e(mid_norm_e(act(gate_e(x)) * up_e(x))) + shared(x)

Tokens are sorted by expert and none is padded (arXiv:2211.15841). The router reads the stream before it enters the
tensor-parallel region; f is split over the ranks of the region, experts over expert-parallel ranks.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megnorm.config.placement import FFNSlots
from megnorm.model.common import Common
from megnorm.model.documents import Documents
from megnorm.model.ffn import ACTIVATIONS, make_ffn
from megnorm.model.grouped import grouped_linear
from megnorm.model.init import BlockInit
from megnorm.model.norm import experts_norm
from megnorm.model.router import Router
from megnorm.parallel.sharding import Constant


class MoE(nn.Module):
    """[b, s, d] -> [b, s, d]."""

    def __init__(self, name: str, layer: int, common: Common, slots: FFNSlots, init: BlockInit):
        super().__init__()
        moe, self.tp, self.ep = common.model.moe, common.tp, common.ep
        self.experts_in_all, self.drops = moe.experts, moe.capacity is not None
        self.router = Router(f"{name}.router", layer, common, init)
        self.experts = Experts(f"{name}.experts", common, slots, init)
        self.shared = (make_ffn(f"{name}.shared", common, slots, init, moe.shared_experts * moe.ffn_hidden)
                       if moe.shared_experts else None)

    def forward(self, x: Tensor, documents: Documents | None = None) -> Tensor:
        chosen, gates = self.router(x, documents)
        enter = self.tp.enter
        y = self.tp.leave(self.routed(enter(x), enter(chosen), enter(gates)))
        return y if self.shared is None else y + self.shared(x)

    def routed(self, x: Tensor, chosen: Tensor, gates: Tensor) -> Tensor:
        """Inside the region: x [b, s, d], chosen and gates [b, s, k] -> partial sums [b, s, d]."""
        choices = chosen.flatten()
        counts = torch.bincount(choices, minlength=self.experts_in_all + 1)[:-1]
        order = choices.argsort(stable=True)
        if self.drops:  # what is dropped stands at the end, as of one expert more
            order = order[:int(counts.sum())]
        places = torch.full_like(choices, len(order)).index_copy_(0, order, torch.arange(len(order), device=x.device))
        places = places.view(-1, chosen.shape[-1])
        rows = self.ep.around(self.experts)(Spread.apply(x.flatten(0, 1), order, places), counts)
        return Combine.apply(rows, gates.flatten(0, 1).to(x.dtype), order, places).view(x.shape)


class Experts(nn.Module):
    """This rank's experts: rows [m, d] sorted by expert, the number of rows of each -> partial sums [m, d]."""

    def __init__(self, name: str, common: Common, slots: FFNSlots, init: BlockInit):
        super().__init__()
        model, moe, self.tp = common.model, common.model.moe, common.tp
        n, d, f = moe.experts, model.hidden, moe.ffn_hidden
        self.activation, fused = ACTIVATIONS[model.activation]
        first = f"{name}.gate_up" if fused == 2 else f"{name}.up"
        make = partial(common.tp.parameter, experts=common.ep.slice)
        self.up = make(first, (n, fused, f, d), dim=2, role="matrix", init=init.up)
        self.down = make(f"{name}.down", (n, d, f), dim=2, role="matrix", init=init.down)
        about = {"role": "bias", "init": Constant(0.0)}
        self.up_bias = make(f"{first}_bias", (n, fused, f), dim=2, **about) if model.bias else None
        self.down_bias = make(f"{name}.down_bias", (n, d), partial=True, **about) if model.bias else None
        self.mid_norm = experts_norm(f"{name}.mid_norm", slots.mid_norm, n, f, common.tp, make)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        h = grouped_linear(rows, self.up.flatten(1, 2), counts)
        if self.up_bias is not None:
            h = h + self.up_bias.flatten(1).repeat_interleave(counts, 0)
        y = grouped_linear(self.mid_norm(self.activation(h), counts), self.down, counts)
        if self.down_bias is not None:  # every rank adds its part, since their sums are added up
            y = y + (self.tp.shared(self.down_bias) / self.tp.size).repeat_interleave(counts, 0)
        return y


class Spread(torch.autograd.Function):
    """x [t, d] -> rows [m, d]: row i is the token of choice order[i]; token t makes the choices t k to t k + k - 1,
    whose rows stand at places [t, k]."""

    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.places = places
        return x.index_select(0, order.div(places.shape[1], rounding_mode="floor"))

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return sum_of_rows(grad, ctx.places), None, None


class Combine(torch.autograd.Function):
    """y_t = sum over the choices of token t of gate * row: rows [m, d], gates [t, k] -> [t, d]."""

    @staticmethod
    def forward(ctx, rows: Tensor, gates: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(rows, gates)
        ctx.order = order
        return sum_of_rows(rows, places, gates)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, gates = ctx.saved_tensors
        by_row = grad.index_select(0, ctx.order.div(gates.shape[1], rounding_mode="floor"))
        d_gates = torch.bmm(by_row.unsqueeze(1), rows.unsqueeze(2)).flatten()
        d_gates = gates.new_zeros(gates.numel()).index_copy_(0, ctx.order, d_gates).view(gates.shape)
        return by_row.mul_(gates.flatten()[ctx.order].unsqueeze(1)), d_gates, None, None


def sum_of_rows(rows: Tensor, places: Tensor, weights: Tensor | None = None) -> Tensor:
    """y_t = sum_j weights[t, j] rows[places[t, j]]: [m, d] -> [t, d]; place m is a row of zeros. Always in the order
    of j, so that a repetition gives the same bits."""
    if len(rows) < places.numel():  # something was dropped
        rows = F.pad(rows, (0, 0, 0, 1))
    return F.embedding_bag(places, rows, per_sample_weights=weights, mode="sum")
