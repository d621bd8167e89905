"""Causal grouped-query attention; b batch, s sequence, d hidden, h heads, k kv heads, e head size."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from megnorm.config.placement import AttentionSlots, HeadNorm
from megnorm.model.common import Common
from megnorm.model.documents import Documents
from megnorm.model.init import BlockInit
from megnorm.model.norm import Make, heads_norm
from megnorm.parallel.linear import ColumnLinear, RowLinear
from megnorm.parallel.sharding import Constant
from megnorm.parallel.tensor import Alone


class Attention(nn.Module):
    """scale_after(out(scale_before(gate(ctx_norm(core(R q_norm(q), R k_norm(k), v_norm(v))))))).

    R is the rotation; heads are split over tensor-parallel ranks, in the core over context-parallel ones too.
    """

    def __init__(self, name: str, common: Common, slots: AttentionSlots, init: BlockInit):
        super().__init__()
        model, tp = common.model, common.tp
        self.tp, self.turn, self.core, self.head_size = tp, common.turn, common.core, model.head_size
        h, k, e = model.heads, model.kv_heads, model.head_size
        about = {"bias": model.bias, "tp": tp}
        self.q = ColumnLinear(f"{name}.q", model.hidden, h * e, init=init.q, **about)
        self.k = ColumnLinear(f"{name}.k", model.hidden, k * e, slices=k, init=init.k, **about)
        self.v = ColumnLinear(f"{name}.v", model.hidden, k * e, slices=k, init=init.v, **about)
        self.out = RowLinear(f"{name}.out", h * e, model.hidden, init=init.out, **about)
        norm = partial(heads_norm, head_size=e, tp=tp, backend=model.norm.backend)
        self.q_norm = norm(f"{name}.q_norm", slots.q_norm, h)
        self.k_norm = norm(f"{name}.k_norm", slots.k_norm, k)
        self.v_norm = norm(f"{name}.v_norm", slots.v_norm, k)
        self.ctx_norm = norm(f"{name}.ctx_norm", slots.ctx_norm, h)
        self.place_q, self.place_k = placing(slots.q_norm), placing(slots.k_norm)
        self.gate = make_gate(f"{name}.gate", slots.gate, common, init)
        own = partial(tp.parameter, dim=0, slices=min(h, tp.size))
        scale = partial(head_scale, f"{name}.head_scale", heads=h, tp=tp)
        self.scale_before = scale(slots.head_scale == "before", make=own)
        self.scale_after = scale(slots.head_scale == "after", make=tp.on_stream)

    def forward(self, x: Tensor, documents: Documents | None = None) -> Tensor:
        x = self.tp.enter(x)
        turn = partial(self.turn, documents=documents)
        q = self.place_q(self.q(x), self.q_norm, turn, self.head_size)
        k = self.place_k(self.k(x), self.k_norm, turn, self.head_size)
        v = by_head(self.v_norm(self.v(x)), self.head_size)
        context = self.gate(self.ctx_norm(flat(self.core(q, k, v, documents))), x)
        return self.scale_after(self.out(self.scale_before(context)))


def by_head(x: Tensor, head_size: int) -> Tensor:
    """[b, s, h e] -> [b, h, s, e]."""
    return x.unflatten(-1, (-1, head_size)).transpose(1, 2)


def flat(x: Tensor) -> Tensor:
    """[b, h, s, e] -> [b, s, h e]."""
    return x.transpose(1, 2).flatten(2)


Turn = Callable[[Tensor], Tensor]


def norm_then_turn(x: Tensor, norm: nn.Module, turn: Turn, head_size: int) -> Tensor:
    """Queries or keys [b, s, h e] -> [b, h, s, e]."""
    return turn(by_head(norm(x), head_size))


def turn_then_norm(x: Tensor, norm: nn.Module, turn: Turn, head_size: int) -> Tensor:
    """Queries or keys [b, s, h e] -> [b, h, s, e]."""
    return by_head(norm(flat(turn(by_head(x, head_size)))), head_size)


def placing(norm: HeadNorm | None) -> Callable[[Tensor, nn.Module, Turn, int], Tensor]:
    """In which order queries or keys are normed and turned."""
    return turn_then_norm if norm is not None and norm.rope == "after" else norm_then_turn


class Gate(nn.Module):
    """context * sigmoid(W x) (arXiv:2505.06708), one gate for each head or each element."""

    def __init__(self, name: str, width: int, common: Common, init: BlockInit):
        super().__init__()
        self.score = ColumnLinear(name, common.model.hidden, width, bias=common.model.bias,
                                  init=init.attention_gate, tp=common.tp)

    def forward(self, context: Tensor, x: Tensor) -> Tensor:
        """context [b, s, h e / tp], x [b, s, d] inside the region."""
        gate = torch.sigmoid(self.score(x)).unsqueeze(-1)
        return (context.unflatten(-1, (gate.shape[-2], -1)) * gate).flatten(-2)


class Open(nn.Module):
    """No gate."""

    def forward(self, context: Tensor, x: Tensor) -> Tensor:
        return context


def make_gate(name: str, slot: str, common: Common, init: BlockInit) -> nn.Module:
    """The gate that the slot describes."""
    model = common.model
    width = {"none": 0, "head": model.heads, "element": model.heads * model.head_size}[slot]
    return Gate(name, width, common, init) if width else Open()


class HeadScale(nn.Module):
    """A learned factor for each of as many contiguous chunks of x as there are heads (arXiv:2110.09456)."""

    def __init__(self, name: str, heads: int, make: Make, tp: Alone):
        super().__init__()
        self.tp = tp
        self.factor = make(f"{name}.factor", (heads,), role="norm", init=Constant(1.0))

    def forward(self, x: Tensor) -> Tensor:
        factor = self.tp.shared(self.factor)
        return (x.unflatten(-1, (len(factor), -1)) * factor[:, None]).flatten(-2)


def head_scale(name: str, here: bool, *, heads: int, tp: Alone, make: Make) -> nn.Module:
    """The factors if they stand here."""
    return HeadScale(name, heads, make, tp) if here else nn.Identity()
