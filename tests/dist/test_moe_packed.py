"""Packed rows, from the corpus to the routers: padding changes nothing, on every layout."""

from contextlib import ExitStack
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from faults import swap
from tiny import tiny_config

from megnorm.data.indexed import IndexedWriter, best_dtype
from megnorm.plan.layout import make_layout
from megnorm.testing.ranks import run_ranks

MOE = {"experts": 4, "top_k": 2, "ffn_hidden": 16, "z_weight": 0.1}
BALANCED = {
    "aux": {**MOE, "balance": "aux", "aux_weight": 0.1},
    "sequence": {**MOE, "balance": "sequence", "aux_weight": 0.1},
    "bias": {**MOE, "balance": "bias", "bias_rate": 0.05, "router": "sigmoid"},
}
LAYOUTS = {
    "tp2_sp": (2, "aux", {"parallel__tp": 2, "parallel__sp": True}),
    "cp2": (2, "sequence", {"parallel__cp": 2}),
    "pp2": (2, "bias", {"parallel__pp": 2}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Documents of which no two fit into a row of 17 to 23 tokens."""
    stream, folder = np.random.Generator(np.random.Philox(key=4)), tmp_path_factory.mktemp("corpus")
    with IndexedWriter(folder / "train", best_dtype(61)) as writer:
        for length in stream.integers(12, 17, 16):
            writer.add_document(stream.integers(0, 61, length).tolist())
    return folder


def packed(folder, length, balance, **changes):
    return tiny_config("pre", model__layers=2, model__moe=BALANCED[balance], data__packing="best_fit",
                       data__train=str(folder / "train"), data__sequence_length=length, train__micro_batch=2, **changes)


def two_steps(config, part=None):
    """On a rank: loss, norm of the gradient and what routers did, step by step. part: a planted fault, this part
    of a row in place of the rank's own."""
    from megnorm.build import build_engine
    from megnorm.data.datasets import open_datasets
    from megnorm.engine.start import start
    from megnorm.loop import as_tensors, step_batches
    from megnorm.parallel.groups import make_groups
    from megnorm.parallel.tokens import SequenceParts

    device = torch.device("cpu")
    start(device, 600)
    groups = make_groups(make_layout(config, dist.get_world_size()), device, config.model.kv_heads)
    engine, datasets = build_engine(config, groups), open_datasets(config)
    with ExitStack() as stack:
        if part is not None:
            swap(stack, SequenceParts, "own", lambda _: lambda self, rows: rows.chunk(self.count, 1)[part])
        results = [engine.step(as_tensors(step_batches(config, datasets, groups, step), groups), 0.05, step + 1)
                   for step in range(2)]
    return [[r.loss, r.grad_norm, *r.beside.values(), *np.hstack([np.hstack(its) for its in r.routing.values()])]
            for r in results]


@cache
def reference(folder, balance):
    (right,) = run_ranks(two_steps, 1, packed(folder, 16, balance))
    return right


@pytest.mark.parametrize("layout", LAYOUTS)
def test_more_padding_changes_nothing(layout, folder):
    """Longer rows with the same documents, against one process."""
    world, balance, changes = LAYOUTS[layout]
    right = reference(folder, balance)
    for found in run_ranks(two_steps, world, packed(folder, 20, balance, **changes)):
        assert np.allclose(found, right, rtol=1e-5, atol=1e-7)
    assert not np.allclose(*right, rtol=1e-3)


def test_another_part_of_the_row_is_noticed(folder):
    config = packed(folder, 20, "aux", parallel__tp=2, parallel__sp=True)
    found = run_ranks(two_steps, 2, config, 0)[0]
    assert not np.allclose(found, reference(folder, "aux"), rtol=1e-3)
