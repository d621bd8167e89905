"""Initial values: a function of (seed, global name, global index), the same for every layout."""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from megnorm.config import ModelConfig
from megnorm.norms import init_policy
from megnorm.parallel.sharding import Constant, Normal, Sharding, sharding_of

BLOCK_ROWS = 64


@dataclass(frozen=True)
class BlockInit:
    """Distributions of one block's matrices; ``attention_gate``: of the attention's output gate; gate, up, down: of an
    FFN or each expert."""

    q: Normal
    k: Normal
    v: Normal
    attention_gate: Normal
    out: Normal
    router: Normal
    gate: Normal
    up: Normal
    down: Normal


def block_init(model: ModelConfig, layer: int) -> BlockInit:
    """The distributions of the block with global number ``layer``, from 0; policies: see InitConfig."""
    policy, depth = init_policy(model), model.layers
    width = model.moe.ffn_hidden if layer in model.moe_layers else model.ffn_hidden
    std = {name: base_std(model) for name in BlockInit.__dataclass_fields__}
    if policy == "megatron":
        _multiply(std, ("out", "down"), 1 / math.sqrt(2 * depth))
    elif policy == "depth_scaled":
        _multiply(std, ("out", "down"), 1 / math.sqrt(2 * (layer + 1)))
        _multiply(std, ("down",), math.sqrt(model.hidden / width))
    elif policy == "deepnorm":
        std = {name: math.sqrt(2 / (rows + columns)) for name, (rows, columns) in _shapes(model, width).items()}
        _multiply(std, ("v", "out", "gate", "up", "down"), (8 * depth) ** -0.25)
    elif policy == "sub_ln":
        _multiply(std, ("v", "out", "gate", "up", "down"), math.sqrt(math.log(2 * depth)))
    return BlockInit(**{name: Normal(value, model.init.cut) for name, value in std.items()})


def ends_init(model: ModelConfig) -> tuple[Normal, Normal]:
    """Distributions of the embedding, and of an output layer with a weight of its own: 1/sqrt(d) for megatron
    (HybridNorm's code) unless a std is given."""
    std = base_std(model)
    embedding = model.init.embedding_std if model.init.embedding_std is not None else std
    by_width = init_policy(model) == "megatron" and model.init.std is None
    return (Normal(embedding, model.init.cut),
            Normal(1 / math.sqrt(model.hidden) if by_width else std, model.init.cut))


def base_std(model: ModelConfig) -> float:
    """The given standard deviation; by default 1/sqrt(d) for depth_scaled, 1/sqrt(2.5 d) for the others."""
    if model.init.std is not None:
        return model.init.std
    return 1 / math.sqrt(model.hidden if init_policy(model) == "depth_scaled" else 2.5 * model.hidden)


def _multiply(std: dict[str, float], names: Iterable[str], factor: float) -> None:
    for name in names:
        std[name] *= factor


def _shapes(model: ModelConfig, f: int) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of each matrix of a block in the whole model; f: inner width of its FFN or of one expert."""
    d = model.hidden
    heads, kv = model.heads * model.head_size, model.kv_heads * model.head_size
    return {"q": (heads, d), "k": (kv, d), "v": (kv, d), "attention_gate": (heads, d), "out": (d, heads),
            "router": (model.moe.experts if model.moe else 0, d), "gate": (f, d), "up": (f, d), "down": (d, f)}


@torch.no_grad()
def initialise(parameters: Iterable[nn.Parameter], seed: int) -> None:
    """Fill every parameter according to its metadata."""
    for parameter in parameters:
        sharding = sharding_of(parameter)
        parts = parameter.unbind(0) if sharding.experts is not None else [parameter]
        for part, its in zip(parts, sharding.by_expert(), strict=True):
            if isinstance(its.init, Constant):
                part.fill_(its.init.value)
            else:
                part.copy_(torch.from_numpy(_normal_slice(its, its.init, seed)))


def _normal_slice(sharding: Sharding, init: Normal, seed: int) -> np.ndarray:
    """This rank's slice of a matrix, or of several that are stacked and have streams of their own."""
    if len(sharding.shape) == 2:
        return _normal_matrix(sharding, init, seed)
    dim = None if sharding.dim is None else sharding.dim - 1
    return np.stack([_normal_slice(replace(sharding, name=f"{sharding.name}.{number}", shape=sharding.shape[1:], dim=dim),
                                   init, seed) for number in range(sharding.shape[0])])


def _normal_matrix(sharding: Sharding, init: Normal, seed: int) -> np.ndarray:
    """This rank's slice of a normal matrix, drawn in blocks of rows, of which each has its own stream."""
    rows, columns = sharding.slices()
    parts = []
    for block in range(rows.start // BLOCK_ROWS, -(-rows.stop // BLOCK_ROWS)):
        first = block * BLOCK_ROWS
        last = min(first + BLOCK_ROWS, sharding.shape[0])
        values = _cut_normal(_stream(seed, sharding.name, block), (last - first, sharding.shape[1]), init.cut)
        parts.append(values[max(rows.start - first, 0):rows.stop - first, columns])
    return np.concatenate(parts) * np.float32(init.std)


def _stream(seed: int, name: str, block: int) -> np.random.Generator:
    key = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))


def _cut_normal(stream: np.random.Generator, shape: tuple[int, int], cut: float) -> np.ndarray:
    """Standard normal samples, those beyond ``cut`` drawn again."""
    values = stream.standard_normal(shape, dtype=np.float32)
    while (beyond := np.abs(values) > cut).any():
        values[beyond] = stream.standard_normal(int(beyond.sum()), dtype=np.float32)
    return values
