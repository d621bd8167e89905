"""The feed-forward body: down(mid_norm(act(gate(x)) * up(x))) or down(mid_norm(act(up(x))))."""

import torch.nn.functional as F
from torch import Tensor, nn

from megnorm.config import ModelConfig
from megnorm.config.placement import FFNSlots
from megnorm.model.init import InitStd
from megnorm.model.norm import inner_norm
from megnorm.parallel.linear import ColumnLinear, RowLinear
from megnorm.parallel.tensor import Alone


def relu2(x: Tensor) -> Tensor:
    """Squared ReLU (arXiv:2109.08668)."""
    return F.relu(x).square()


class FFN(nn.Module):
    """Two linears around an activation; GELU (tanh form) or squared ReLU."""

    ACTIVATIONS = {"gelu": lambda x: F.gelu(x, approximate="tanh"), "relu2": relu2}

    def __init__(self, name: str, model: ModelConfig, slots: FFNSlots, std: InitStd, tp: Alone):
        super().__init__()
        self.tp = tp
        self.activation = self.ACTIVATIONS[model.activation]
        self.up = ColumnLinear(f"{name}.up", model.hidden, model.ffn_hidden, bias=model.bias, init=std.inner, tp=tp)
        self.down = RowLinear(f"{name}.down", model.ffn_hidden, model.hidden, bias=model.bias, init=std.output, tp=tp)
        self.mid_norm = inner_norm(f"{name}.mid_norm", slots.mid_norm, model.ffn_hidden, tp)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.mid_norm(self.activation(self.up(self.tp.enter(x)))))


class SwiGLU(nn.Module):
    """silu(gate(x)) * up(x) (arXiv:2002.05202)."""

    def __init__(self, name: str, model: ModelConfig, slots: FFNSlots, std: InitStd, tp: Alone):
        super().__init__()
        self.tp = tp
        about = {"bias": model.bias, "init": std.inner, "tp": tp}
        self.gate = ColumnLinear(f"{name}.gate", model.hidden, model.ffn_hidden, **about)
        self.up = ColumnLinear(f"{name}.up", model.hidden, model.ffn_hidden, **about)
        self.down = RowLinear(f"{name}.down", model.ffn_hidden, model.hidden, bias=model.bias, init=std.output, tp=tp)
        self.mid_norm = inner_norm(f"{name}.mid_norm", slots.mid_norm, model.ffn_hidden, tp)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tp.enter(x)
        return self.down(self.mid_norm(F.silu(self.gate(x)) * self.up(x)))


def make_ffn(name: str, model: ModelConfig, slots: FFNSlots, std: InitStd, tp: Alone) -> nn.Module:
    """The FFN that the configuration names."""
    return (SwiGLU if model.activation == "swiglu" else FFN)(name, model, slots, std, tp)
