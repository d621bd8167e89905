"""The sublayer equation, in one place, and the block of two sublayers."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megnorm.config.placement import Block as BlockSlots
from megnorm.config.placement import Sublayer as Slots
from megnorm.model.attention import Attention
from megnorm.model.common import Common
from megnorm.model.documents import Documents
from megnorm.model.ffn import make_ffn
from megnorm.model.init import block_init
from megnorm.model.moe import MoE
from megnorm.model.norm import hidden_norm
from megnorm.model.scale import make_scale


class Sublayer(nn.Module):
    """x = post_norm(residual_scale * r + branch_scale * out_norm(body(h))), h = in_norm(x), r = h or x.

    The residual leaves the stream before the body enters its tensor-parallel region.
    """

    def __init__(self, name: str, slots: Slots, body: nn.Module, common: Common):
        super().__init__()
        about = {"width": common.model.hidden, "tp": common.tp}
        norm = partial(hidden_norm, backend=common.model.norm.backend, **about)
        scale = partial(make_scale, clock=common.clock, **about)
        self.body = body
        self.residual_from = slots.residual_from
        self.in_norm = norm(f"{name}.in_norm", slots.in_norm)
        self.out_norm = norm(f"{name}.out_norm", slots.out_norm)
        self.post_norm = norm(f"{name}.post_norm", slots.post_norm)
        self.residual_scale = scale(f"{name}.residual_scale", slots.residual_scale)
        self.branch_scale = scale(f"{name}.branch_scale", slots.branch_scale)

    def forward(self, x: Tensor, *about: Any) -> Tensor:
        """about: what the body takes beside h."""
        return self.step(x, *about)[0]

    def step(self, x: Tensor, *about: Any) -> tuple[Tensor, Tensor]:
        """The new x, and the branch that was added to it."""
        h = self.in_norm(x)
        r = h if self.residual_from == "normed" else x
        branch = self.branch_scale(self.out_norm(self.body(h, *about)))
        return self.post_norm(self.residual_scale(r) + branch), branch


class TwoStreamSublayer(Sublayer):
    """Beside x a second stream y, to which every branch is added (ResiDual, arXiv:2304.14802).

    Both are one tensor [b, s, 2 d], x first, so that they pass as one through recomputation and pipeline.
    """

    def forward(self, streams: Tensor, *about: Any) -> Tensor:
        x, y = streams.chunk(2, -1)
        x, branch = self.step(x, *about)
        return torch.cat((x, y + branch), -1)


SUBLAYERS = {"single": Sublayer, "residual": TwoStreamSublayer}


class Block(nn.Module):
    """Attention, then FFN: [b, s, d] -> [b, s, d] for each stream. ``layer`` is the global number, from 0."""

    def __init__(self, layer: int, slots: BlockSlots, streams: str, common: Common):
        super().__init__()
        self.layer = layer
        name, init, sublayer = f"layers.{layer}", block_init(common.model, layer), SUBLAYERS[streams]
        attention = Attention(f"{name}.attention", common, slots.attention, init)
        if layer in common.model.moe_layers:
            ffn = MoE(f"{name}.ffn", layer, common, slots.ffn, init)
        else:
            ffn = make_ffn(f"{name}.ffn", common, slots.ffn, init, common.model.ffn_hidden)
        self.attention = sublayer(f"{name}.attention", slots.attention, attention, common)
        self.ffn = sublayer(f"{name}.ffn", slots.ffn, ffn, common)

    def forward(self, x: Tensor, documents: Documents | None = None) -> Tensor:
        return self.ffn(self.attention(x, documents), documents)


class Split(nn.Module):
    """The start of two streams: x -> (x, x)."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x, x), -1)


class Merge(nn.Module):
    """The end of two streams: x + final_norm(y)."""

    def __init__(self, final_norm: nn.Module):
        super().__init__()
        self.final_norm = final_norm

    def forward(self, streams: Tensor) -> Tensor:
        x, y = streams.chunk(2, -1)
        return x + self.final_norm(y)
