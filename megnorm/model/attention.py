"""Causal grouped-query attention; letters: b batch, s sequence, d hidden, h heads, k kv heads, e head size."""

import torch.nn.functional as F
from torch import Tensor, nn

from megnorm.config import ModelConfig
from megnorm.config.placement import AttentionSlots
from megnorm.model.init import InitStd
from megnorm.model.norm import heads_norm
from megnorm.model.rotary import Rotary
from megnorm.parallel.linear import ColumnLinear, RowLinear
from megnorm.parallel.tensor import Alone


class Attention(nn.Module):
    """out(ctx_norm(softmax(R q_norm(q) . R k_norm(k) / sqrt(e)) v_norm(v))), heads split over ranks."""

    def __init__(self, name: str, model: ModelConfig, slots: AttentionSlots, std: InitStd, rotary: Rotary, tp: Alone):
        super().__init__()
        self.tp, self.rotary, self.head_size = tp, rotary, model.head_size
        h, k, e = model.heads, model.kv_heads, model.head_size
        about = {"bias": model.bias, "init": std.inner, "tp": tp}
        self.q = ColumnLinear(f"{name}.q", model.hidden, h * e, **about)
        self.k = ColumnLinear(f"{name}.k", model.hidden, k * e, slices=k, **about)
        self.v = ColumnLinear(f"{name}.v", model.hidden, k * e, slices=k, **about)
        self.out = RowLinear(f"{name}.out", h * e, model.hidden, bias=model.bias, init=std.output, tp=tp)
        self.q_norm = heads_norm(f"{name}.q_norm", slots.q_norm, h, e, tp)
        self.k_norm = heads_norm(f"{name}.k_norm", slots.k_norm, k, e, tp)
        self.v_norm = heads_norm(f"{name}.v_norm", slots.v_norm, k, e, tp)
        self.ctx_norm = heads_norm(f"{name}.ctx_norm", slots.ctx_norm, h, e, tp)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tp.enter(x)
        q = self.rotary(self._heads(self.q_norm(self.q(x))))
        k = self.rotary(self._heads(self.k_norm(self.k(x))))
        v = self._heads(self.v_norm(self.v(x)))
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(self.ctx_norm(context.transpose(1, 2).flatten(2)))

    def _heads(self, x: Tensor) -> Tensor:
        """[b, s, h e] -> [b, h, s, e]."""
        return x.unflatten(-1, (-1, self.head_size)).transpose(1, 2)
