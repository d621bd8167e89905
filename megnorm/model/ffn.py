"""The feed-forward body: down(mid_norm(act(gate(x)) * up(x))) or down(mid_norm(act(up(x)))).

Documents are told to every body; a token's FFN depends on nothing beside the token.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from megnorm.config.placement import FFNSlots
from megnorm.model.common import Common
from megnorm.model.documents import Documents
from megnorm.model.init import BlockInit
from megnorm.model.norm import inner_norm
from megnorm.parallel.linear import ColumnLinear, RowLinear


def relu2(x: Tensor) -> Tensor:
    """Squared ReLU (arXiv:2109.08668)."""
    return F.relu(x).square()


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up of x = [gate, up] (arXiv:2002.05202)."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


# GELU in its tanh form. Beside each activation: how many times the inner width it reads.
ACTIVATIONS = {"gelu": (lambda x: F.gelu(x, approximate="tanh"), 1), "relu2": (relu2, 1), "swiglu": (swiglu, 2)}


class FFN(nn.Module):
    """Two linears around an activation."""

    def __init__(self, name: str, common: Common, slots: FFNSlots, init: BlockInit, width: int):
        super().__init__()
        model, tp = common.model, common.tp
        d, f, about = model.hidden, width, {"bias": model.bias, "tp": tp}
        self.tp = tp
        self.activation, _ = ACTIVATIONS[model.activation]
        self.up = ColumnLinear(f"{name}.up", d, f, init=init.up, **about)
        self.down = RowLinear(f"{name}.down", f, d, init=init.down, **about)
        self.mid_norm = inner_norm(f"{name}.mid_norm", slots.mid_norm, f, tp, model.norm.backend)

    def forward(self, x: Tensor, documents: Documents | None = None) -> Tensor:
        return self.down(self.mid_norm(self.activation(self.up(self.tp.enter(x)))))


class SwiGLU(nn.Module):
    """silu(gate(x)) * up(x), from matrices of their own."""

    def __init__(self, name: str, common: Common, slots: FFNSlots, init: BlockInit, width: int):
        super().__init__()
        model, tp = common.model, common.tp
        d, f, about = model.hidden, width, {"bias": model.bias, "tp": tp}
        self.tp = tp
        self.gate = ColumnLinear(f"{name}.gate", d, f, init=init.gate, **about)
        self.up = ColumnLinear(f"{name}.up", d, f, init=init.up, **about)
        self.down = RowLinear(f"{name}.down", f, d, init=init.down, **about)
        self.mid_norm = inner_norm(f"{name}.mid_norm", slots.mid_norm, f, tp, model.norm.backend)

    def forward(self, x: Tensor, documents: Documents | None = None) -> Tensor:
        x = self.tp.enter(x)
        return self.down(self.mid_norm(F.silu(self.gate(x)) * self.up(x)))


def make_ffn(name: str, common: Common, slots: FFNSlots, init: BlockInit, width: int) -> nn.Module:
    """The FFN that the configuration names, with an inner axis of ``width``."""
    return (SwiGLU if common.model.activation == "swiglu" else FFN)(name, common, slots, init, width)
