"""The training steps that a benchmark compares: the same sizes, batch, optimizer and clipping for all."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megnorm.build import build_engine, build_module
from megnorm.config import Config, parse_config
from megnorm.engine.start import start
from megnorm.parallel.groups import Groups, make_groups
from megnorm.plan.layout import make_layout
from megnorm.testing.bench_step import LEARNING_RATE, Shape, Step

CLIP = 1.0
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def bench_config(shape: Shape, dtype: str, scheme: str) -> Config:
    """A run of megnorm at these sizes, everything else as the configuration's defaults have it."""
    return parse_config({
        "run_dir": "unused",
        "model": {"layers": shape.layers, "hidden": shape.hidden, "heads": shape.heads, "kv_heads": shape.kv_heads,
                  "ffn_hidden": shape.ffn_hidden, "vocab_size": shape.vocab, "norm": scheme},
        "data": {"sequence_length": shape.sequence, "train": "unused"},
        "train": {"steps": 1, "micro_batch": shape.batch, "global_batch": shape.batch, "dtype": dtype, "clip": CLIP},
        "optimizer": {"lr": LEARNING_RATE},
    })


def batch_of(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """tokens [b, s], targets [b, s], weights [b, s] of a mean."""
    ids = torch.randint(shape.vocab, (shape.batch, shape.sequence + 1), generator=torch.Generator().manual_seed(0))
    weights = torch.full((shape.batch, shape.sequence), 1 / shape.tokens)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), weights


def alone(config: Config) -> Groups:
    """The groups of a world of one process."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    start(torch.device("cpu"), 60)
    return make_groups(make_layout(config, 1), torch.device("cpu"))


def with_engine(shape: Shape, dtype: str, scheme: str) -> Step:
    """megnorm as a user runs it: the DeepSpeed engine and everything around it."""
    config = bench_config(shape, dtype, scheme)
    engine, batch = build_engine(config, alone(config)), batch_of(shape)
    return lambda: engine.step([batch], LEARNING_RATE, 1)


def plain_loop(shape: Shape, dtype: str, scheme: str) -> Step:
    """megnorm's model in a plain torch loop: what the engine adds is the difference to ``with_engine``."""
    config = bench_config(shape, dtype, scheme)
    module = build_module(config, alone(config)).to(DTYPES[dtype])
    batch = batch_of(shape)
    return training_loop(module.parameters(), lambda: module(*batch))


def transformers_llama(shape: Shape, dtype: str) -> Step:
    """transformers' Llama, eager, scaled_dot_product_attention, its own loss, in a plain torch loop."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.ffn_hidden,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.sequence, tie_word_embeddings=True, attn_implementation="sdpa",
        use_cache=False)).to(DTYPES[dtype]).train()
    tokens, _, _ = batch_of(shape)
    return training_loop(model.parameters(), lambda: model(input_ids=tokens, labels=tokens).loss)


def training_loop(parameters: Iterable[nn.Parameter], loss: Callable[[], Tensor]) -> Step:
    """Forward, backward, clipping, fused AdamW; weights that are not fp32 have fp32 masters."""
    weights = list(parameters)
    masters = [w if w.dtype == torch.float32 else nn.Parameter(w.detach().float()) for w in weights]
    optimizer = fused_adamw(masters)

    def step() -> float:
        value = loss()
        value.backward()
        for weight, master in zip(weights, masters, strict=True):
            if master is not weight:
                master.grad, weight.grad = weight.grad.float(), None
        nn.utils.clip_grad_norm_(masters, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for weight, master in zip(weights, masters, strict=True):
                if master is not weight:
                    weight.copy_(master)
        return value.item()

    return step


def floor(shape: Shape, dtype: str) -> Step:
    """The step's matrix products (forward, and both of the backward) and fused AdamW, and nothing else."""
    kind = DTYPES[dtype]
    weights = [torch.randn(out, width, dtype=kind) for width, out in shape.matrices]
    inputs = {width: torch.randn(shape.tokens, width, dtype=kind) for width, _ in shape.matrices}
    grads = {out: torch.randn(shape.tokens, out, dtype=kind) for _, out in shape.matrices}
    masters = [nn.Parameter(w.float()) for w in weights]
    for master in masters:
        master.grad = torch.full_like(master, 1e-3)
    optimizer = fused_adamw(masters)

    def step() -> None:
        for weight in weights:
            out, width = weight.shape
            F.linear(inputs[width], weight)
            grads[out] @ weight
            grads[out].T @ inputs[width]
        optimizer.step()

    return step


def fused_adamw(parameters: list[nn.Parameter]) -> Any:
    """The optimizer of all contestants."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
