"""The FLOP formula against torch's counter on a small model with grouped heads and a tied output."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from megnorm.config import Config, parse_config
from megnorm.plan.flops import flops_per_step, flops_per_token, model_flops_utilization


def make(sequence: int = 16, **model) -> Config:
    sizes = {"layers": 3, "hidden": 24, "heads": 4, "kv_heads": 2, "head_size": 8, "ffn_hidden": 40,
             "vocab_size": 29, "pad_vocab_to": 8, **model}
    return parse_config({"run_dir": "r", "model": sizes, "data": {"sequence_length": sequence, "train": "t"},
                         "train": {"steps": 10, "micro_batch": 1, "global_batch": 1},
                         "optimizer": {"lr": 1.0}})


class Layer(nn.Module):
    """Attention with grouped heads and a SwiGLU, matrices only."""

    def __init__(self, d: int, heads: int, kv: int, e: int, f: int, gated: bool) -> None:
        super().__init__()
        self.heads, self.kv, self.e = heads, kv, e
        self.q, self.k, self.v = (nn.Linear(d, n * e, bias=False) for n in (heads, kv, kv))
        self.out = nn.Linear(heads * e, d, bias=False)
        self.up, self.down = nn.Linear(d, f, bias=False), nn.Linear(f, d, bias=False)
        self.gate = nn.Linear(d, f, bias=False) if gated else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q, k, v = (m(x).view(b, s, -1, self.e).transpose(1, 2) for m in (self.q, self.k, self.v))
        k, v = (t.repeat_interleave(self.heads // self.kv, dim=1) for t in (k, v))
        scores = (q @ k.transpose(2, 3)).softmax(-1)
        x = x + self.out((scores @ v).transpose(1, 2).reshape(b, s, -1))
        inner = F.silu(self.gate(x)) * self.up(x) if self.gate is not None else F.gelu(self.up(x))
        return x + self.down(inner)


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("tie", [True, False])
def test_formula_equals_the_counter(activation: str, tie: bool) -> None:
    config = make(activation=activation, tie_embeddings=tie, sequence=64)
    layers = nn.Sequential(*(Layer(24, 4, 2, 8, 40, activation == "swiglu") for _ in range(3)))
    embedding = nn.Embedding(32, 24)
    output = embedding.weight if tie else nn.Parameter(torch.randn(32, 24))
    tokens = torch.randint(0, 29, (2, 64))
    with FlopCounterMode(display=False) as counter:
        x = embedding(tokens)
        F.cross_entropy((layers(x) @ output.T).flatten(0, 1), tokens.flatten()).backward()
    counted = counter.get_total_flops()
    assert flops_per_token(config).total * 2 * 64 == pytest.approx(counted, rel=0.01)


def test_experts_count_as_chosen() -> None:
    """Two of eight experts of half the width, and a router: the dense model and 8 x 24 weights a layer."""
    dense = flops_per_token(make())
    moe = flops_per_token(make(moe={"experts": 8, "top_k": 2, "ffn_hidden": 20}))
    half = flops_per_token(make(moe={"experts": 8, "top_k": 1, "ffn_hidden": 20, "shared_experts": 1, "layers": "every 3"}))
    assert moe.matmul - dense.matmul == 6 * 3 * 8 * 24 and half.matmul - dense.matmul == 6 * 8 * 24
    assert moe.attention == dense.attention


def test_formula_shows_its_numbers_and_the_causal_half() -> None:
    config = make(sequence=64)
    flops = flops_per_token(config)
    assert f"{flops.total:,}" in flops.formula and f"{flops.attention_causal:,}" in flops.legend
    assert flops.attention == 12 * 3 * 4 * 8 * 64 == 2 * flops.attention_causal
    assert flops_per_step(config) == flops.total * 64


def test_utilization_counts_every_device() -> None:
    config = make()
    speed = 1e12 / flops_per_token(config).total
    assert model_flops_utilization(config, speed, devices=2, peak_tflops=1.0) == pytest.approx(0.5)
