"""The sublayer equation, in one place, and the block of two sublayers."""

from torch import Tensor, nn

from megnorm.config import ModelConfig
from megnorm.config.placement import Block as BlockSlots
from megnorm.config.placement import Sublayer as Slots
from megnorm.model.attention import Attention
from megnorm.model.ffn import make_ffn
from megnorm.model.init import InitStd
from megnorm.model.norm import hidden_norm
from megnorm.model.rotary import Rotary
from megnorm.parallel.tensor import Alone


class Scale(nn.Module):
    """Multiplication by a constant."""

    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


def scale(factor: float) -> nn.Module:
    """A constant factor; 1 is the identity."""
    return nn.Identity() if factor == 1.0 else Scale(factor)


class Sublayer(nn.Module):
    """x = post_norm(residual_scale * r + branch_scale * out_norm(body(h))), h = in_norm(x), r = h or x.

    The residual leaves the stream before the body enters its tensor-parallel region.
    """

    def __init__(self, name: str, slots: Slots, body: nn.Module, width: int, tp: Alone):
        super().__init__()
        self.body = body
        self.residual_from = slots.residual_from
        self.in_norm = hidden_norm(f"{name}.in_norm", slots.in_norm, width, tp)
        self.out_norm = hidden_norm(f"{name}.out_norm", slots.out_norm, width, tp)
        self.post_norm = hidden_norm(f"{name}.post_norm", slots.post_norm, width, tp)
        self.residual_scale, self.branch_scale = scale(slots.residual_scale.value), scale(slots.branch_scale.value)

    def forward(self, x: Tensor) -> Tensor:
        h = self.in_norm(x)
        r = h if self.residual_from == "normed" else x
        return self.post_norm(self.residual_scale(r) + self.branch_scale(self.out_norm(self.body(h))))


class Block(nn.Module):
    """Attention, then FFN: x [b, s, d] -> [b, s, d]. ``layer`` is the global number, from 0."""

    def __init__(self, layer: int, model: ModelConfig, slots: BlockSlots, std: InitStd, rotary: Rotary, tp: Alone):
        super().__init__()
        name = f"layers.{layer}"
        attention = Attention(f"{name}.attention", model, slots.attention, std, rotary, tp)
        ffn = make_ffn(f"{name}.ffn", model, slots.ffn, std, tp)
        self.attention = Sublayer(f"{name}.attention", slots.attention, attention, model.hidden, tp)
        self.ffn = Sublayer(f"{name}.ffn", slots.ffn, ffn, model.hidden, tp)

    def forward(self, x: Tensor) -> Tensor:
        return self.ffn(self.attention(x))
