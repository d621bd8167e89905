"""Whole fp32 weights of a checkpoint, for whoever needs them without an engine."""

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from megnorm.checkpoint.storage import read_manifest

MASTER = "master"


def read_weights(path: Path) -> dict[str, Tensor]:
    """Every parameter by its global name, put together from the slices of the layout that wrote it."""
    manifest = read_manifest(path)
    files = {name: safe_open(path / name, framework="pt") for name in manifest.files}
    weights = {}
    for name, entry in manifest.tensors.items():
        parts = [files[part.file].get_tensor(f"{name}/{MASTER}") for part in entry.parts]
        weights[name] = parts[0] if len(parts) == 1 else torch.cat(parts, entry.dim)
    return weights
