"""Initial values: a function of (seed, global name, global index), the same for every layout."""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from megnorm.config import ModelConfig
from megnorm.norms import init_policy
from megnorm.parallel.sharding import Constant, Normal, Sharding, sharding_of

BLOCK_ROWS = 64


@dataclass(frozen=True)
class InitStd:
    """Distributions of one model: matrices that read the stream, matrices that write it, embeddings."""

    inner: Normal
    output: Normal
    embedding: Normal


def init_std(model: ModelConfig) -> InitStd:
    """The policy's standard deviations; "megatron" divides the output matrices' by sqrt(2 L)."""
    std = model.init.std if model.init.std is not None else 1 / math.sqrt(2.5 * model.hidden)
    depth = math.sqrt(2 * model.layers) if init_policy(model) == "megatron" else 1.0
    cut = model.init.cut
    return InitStd(Normal(std, cut), Normal(std / depth, cut), Normal(std, cut))


@torch.no_grad()
def initialise(parameters: Iterable[nn.Parameter], seed: int) -> None:
    """Fill every parameter according to its metadata."""
    for parameter in parameters:
        sharding = sharding_of(parameter)
        if isinstance(sharding.init, Constant):
            parameter.fill_(sharding.init.value)
        else:
            parameter.copy_(torch.from_numpy(_normal_slice(sharding, sharding.init, seed)))


def _normal_slice(sharding: Sharding, init: Normal, seed: int) -> np.ndarray:
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
