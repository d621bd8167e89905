"""What a mixture-of-experts layer costs in CPU-seconds, forward and backward: megnorm's beside transformers' and
DeepSpeed's, and beside the experts' matrix products alone.

Every layer has the same weights and sees the same input; the shares of a token's experts sum to 1, which DeepSpeed
always has. transformers' block comes twice, with the grouped products that its models take and with its loop over
experts; DeepSpeed's drops no token, as the others, and pads every expert to the fullest.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megnorm.testing.bench_step import Comparison, Step, take_turns

# What is measured, in the order of a turn.
CONTESTANTS = ("ours", "transformers", "transformers, loop", "deepspeed", "products")
KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16}


class MoEShape(NamedTuple):
    """Sizes of a layer of SwiGLU experts, and of its micro batch. skew: standard deviation of a constant that each
    expert's logit gets beside its share of the token; 0 spreads the tokens evenly."""

    hidden: int = 256
    ffn_hidden: int = 128
    experts: int = 16
    top_k: int = 4
    sequence: int = 512
    batch: int = 4
    skew: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.sequence * self.batch


class Weights(NamedTuple):
    """router [E, d], gate_up [E, 2 f, d] with the gate first, down [E, d, f]."""

    router: Tensor
    gate_up: Tensor
    down: Tensor


# OLMoE's (arXiv:2409.02060) proportions, an eighth as wide, a quarter of the experts, half as many chosen.
SHAPES = {"even": MoEShape(), "uneven": MoEShape(skew=0.5), "skewed": MoEShape(skew=1.0)}


def make_weights(shape: MoEShape) -> Weights:
    """The weights of all contestants."""
    stream = torch.Generator().manual_seed(1)
    d, f, n = shape.hidden, shape.ffn_hidden, shape.experts
    router = torch.randn(n, d, generator=stream) * d**-0.5
    router[:, 0] += shape.skew * torch.randn(n, generator=stream)
    return Weights(router, torch.randn(n, 2 * f, d, generator=stream) * d**-0.5,
                   torch.randn(n, d, f, generator=stream) * f**-0.5)


def make_input(shape: MoEShape) -> tuple[Tensor, Tensor]:
    """x and the gradient of the layer's output, [b, s, d]; x's first channel is 1, which the router's skew meets."""
    stream = torch.Generator().manual_seed(2)
    x, gradient = (torch.randn(shape.batch, shape.sequence, shape.hidden, generator=stream) for _ in range(2))
    x[..., 0] = 1.0
    return x, gradient


def compare_moe(shape: str, dtype: str, steps: int, threads: int,
                progress: Callable[[str], None] = lambda text: None) -> Comparison:
    """Take ``steps`` forward and backward passes of each layer in turn, after two of each that don't count."""
    makers = {name: partial(make_moe_step, name, SHAPES[shape], dtype) for name in CONTESTANTS}
    return Comparison(shape, dtype, take_turns(makers, steps, threads, progress=progress))


def make_moe_step(name: str, shape: MoEShape, dtype: str) -> Step:
    """A contestant's step, by its name in CONTESTANTS."""
    from megnorm.engine.products import prefer_onednn

    prefer_onednn()  # as megnorm's workers have it, for all
    if name == "products":
        return products(shape, KINDS[dtype])
    layer = make_layer(name, shape).to(KINDS[dtype])
    x, gradient = (t.to(KINDS[dtype]) for t in make_input(shape))
    x.requires_grad_()

    def step() -> None:
        layer(x).backward(gradient)
        for tensor in (x, *layer.parameters()):
            tensor.grad = None

    return step


def make_layer(name: str, shape: MoEShape) -> nn.Module:
    """x [b, s, d] -> [b, s, d], with the contestants' common weights."""
    weights = make_weights(shape)
    if name == "ours":
        return _ours(shape, weights)
    if name == "deepspeed":
        return _deepspeed(shape, weights)
    return _transformers(shape, weights, "grouped_mm" if name == "transformers" else "eager")


def _ours(shape: MoEShape, weights: Weights) -> nn.Module:
    """The FFN of a model with one block; with OLMoE's balancing and z losses."""
    from megnorm.build import build_module
    from megnorm.config import parse_config
    from megnorm.testing.bench_contestants import alone

    config = parse_config({
        "run_dir": "unused",
        "model": {"layers": 1, "hidden": shape.hidden, "heads": 2, "vocab_size": 128,
                  "moe": {"preset": "olmoe", "experts": shape.experts, "top_k": shape.top_k,
                          "normalise_top_k": True, "ffn_hidden": shape.ffn_hidden}},
        "data": {"sequence_length": shape.sequence, "train": "unused"},
        "train": {"steps": 1, "micro_batch": shape.batch, "global_batch": shape.batch},
        "optimizer": {"lr": 1.0},
    })
    module = build_module(config, alone(config))
    (layer,) = (part.ffn.body for part in module.modules() if hasattr(part, "ffn"))
    _copy((layer.router.weight, weights.router), (layer.experts.up.flatten(1, 2), weights.gate_up),
          (layer.experts.down, weights.down))
    return layer


def _transformers(shape: MoEShape, weights: Weights, experts: str) -> nn.Module:
    from transformers import OlmoeConfig
    from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock

    config = OlmoeConfig(hidden_size=shape.hidden, intermediate_size=shape.ffn_hidden, num_experts=shape.experts,
                         num_experts_per_tok=shape.top_k, norm_topk_prob=True)
    config._experts_implementation = experts
    layer = OlmoeSparseMoeBlock(config)
    _copy((layer.gate.weight, weights.router), (layer.experts.gate_up_proj, weights.gate_up),
          (layer.experts.down_proj, weights.down))
    return layer


class _Expert(nn.Module):
    """A SwiGLU of DeepSpeed's layer, which takes any module."""

    def __init__(self, d: int, f: int):
        super().__init__()
        self.gate_up, self.down = nn.Linear(d, 2 * f, bias=False), nn.Linear(f, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class _OutputOnly(nn.Module):
    """DeepSpeed's layer also returns its balancing loss and counts."""

    def __init__(self, moe: nn.Module):
        super().__init__()
        self.moe = moe

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(x)[0]


def _deepspeed(shape: MoEShape, weights: Weights) -> nn.Module:
    from deepspeed.moe.layer import MoE

    from megnorm.engine.start import start

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    start(torch.device("cpu"), 60)
    layer = MoE(shape.hidden, _Expert(shape.hidden, shape.ffn_hidden), shape.experts, k=shape.top_k, drop_tokens=False)
    layer.set_deepspeed_parallelism()
    experts = layer.deepspeed_moe.experts.deepspeed_experts
    _copy((layer.deepspeed_moe.gate.wg.weight, weights.router))
    for expert, gate_up, down in zip(experts, weights.gate_up, weights.down, strict=True):
        _copy((expert.gate_up.weight, gate_up), (expert.down.weight, down))
    return _OutputOnly(layer)


@torch.no_grad()
def _copy(*pairs: tuple[Tensor, Tensor]) -> None:
    for parameter, value in pairs:
        parameter.copy_(value)


def loads(shape: MoEShape) -> Tensor:
    """Tokens of each expert, [E]."""
    chosen = (make_input(shape)[0].flatten(0, 1) @ make_weights(shape).router.T).topk(shape.top_k, -1).indices
    return torch.bincount(chosen.flatten(), minlength=shape.experts)


def products(shape: MoEShape, kind: torch.dtype) -> Step:
    """The experts' matrix products on the same numbers of tokens, forward and both of backward, and nothing else."""
    weights, counts = make_weights(shape), loads(shape).tolist()
    matrices = [pair for expert in zip(weights.gate_up, weights.down, strict=True) for pair in expert]
    work = [(torch.randn(count, weight.shape[1], dtype=kind), weight.to(kind),
             torch.randn(count, weight.shape[0], dtype=kind))
            for weight, count in zip(matrices, [n for n in counts for _ in range(2)], strict=True)]

    def step() -> None:
        for rows, weight, gradient in work:
            F.linear(rows, weight)
            gradient @ weight
            gradient.T @ rows

    return step
