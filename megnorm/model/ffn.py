"""The feed-forward body: down(mid_norm(act(gate(x)) * up(x))) or down(mid_norm(act(up(x))))."""

import torch.nn.functional as F
from torch import Tensor, nn

from megnorm.config.placement import FFNSlots
from megnorm.model.common import Common
from megnorm.model.init import BlockInit
from megnorm.model.norm import inner_norm
from megnorm.parallel.linear import ColumnLinear, RowLinear


def relu2(x: Tensor) -> Tensor:
    """Squared ReLU (arXiv:2109.08668)."""
    return F.relu(x).square()


class FFN(nn.Module):
    """Two linears around an activation; GELU (tanh form) or squared ReLU."""

    ACTIVATIONS = {"gelu": lambda x: F.gelu(x, approximate="tanh"), "relu2": relu2}

    def __init__(self, name: str, common: Common, slots: FFNSlots, init: BlockInit):
        super().__init__()
        model, tp = common.model, common.tp
        d, f, about = model.hidden, model.ffn_hidden, {"bias": model.bias, "tp": tp}
        self.tp = tp
        self.activation = self.ACTIVATIONS[model.activation]
        self.up = ColumnLinear(f"{name}.up", d, f, init=init.up, **about)
        self.down = RowLinear(f"{name}.down", f, d, init=init.down, **about)
        self.mid_norm = inner_norm(f"{name}.mid_norm", slots.mid_norm, f, tp, model.norm.backend)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.mid_norm(self.activation(self.up(self.tp.enter(x)))))


class SwiGLU(nn.Module):
    """silu(gate(x)) * up(x) (arXiv:2002.05202)."""

    def __init__(self, name: str, common: Common, slots: FFNSlots, init: BlockInit):
        super().__init__()
        model, tp = common.model, common.tp
        d, f, about = model.hidden, model.ffn_hidden, {"bias": model.bias, "tp": tp}
        self.tp = tp
        self.gate = ColumnLinear(f"{name}.gate", d, f, init=init.gate, **about)
        self.up = ColumnLinear(f"{name}.up", d, f, init=init.up, **about)
        self.down = RowLinear(f"{name}.down", f, d, init=init.down, **about)
        self.mid_norm = inner_norm(f"{name}.mid_norm", slots.mid_norm, f, tp, model.norm.backend)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tp.enter(x)
        return self.down(self.mid_norm(F.silu(self.gate(x)) * self.up(x)))


def make_ffn(name: str, common: Common, slots: FFNSlots, init: BlockInit) -> nn.Module:
    """The FFN that the configuration names."""
    return (SwiGLU if common.model.activation == "swiglu" else FFN)(name, common, slots, init)
