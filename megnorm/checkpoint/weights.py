"""Whole fp32 weights of a checkpoint, for whoever needs them without an engine."""

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from megnorm.checkpoint.manifest import STATE
from megnorm.checkpoint.storage import read_manifest
from megnorm.parallel.sharding import kept_states, sharding_of

MASTER = "master"


@torch.no_grad()
def fill(model: nn.Module, path: Path) -> None:
    """Give a model that is whole on this rank the weights of a checkpoint."""
    weights = read_weights(path)
    for parameter in model.parameters():
        sharding = sharding_of(parameter)
        parameter.copy_(sharding.join([weights[part.name] for part in sharding.by_expert()]))
    for name, value in kept_states(model).items():
        value.copy_(weights[name])


def read_weights(path: Path) -> dict[str, Tensor]:
    """Every parameter, of several experts each, and every other state by its global name, put together from the
    slices of the layout that wrote it."""
    manifest = read_manifest(path)
    files = {name: safe_open(path / name, framework="pt") for name in manifest.files}
    weights = {}
    for name, entry in manifest.tensors.items():
        key = STATE if STATE in entry.keys else MASTER
        parts = [files[part.file].get_tensor(f"{name}/{key}") for part in entry.parts]
        weights[name] = parts[0] if len(parts) == 1 else torch.cat(parts, entry.dim)
    return weights
