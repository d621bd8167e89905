"""Probes on every layout: the whole gradient by part and the stream by depth, as plain torch has them."""

import math

import pytest
import torch
import torch.distributed as dist
from tiny import tiny_config

from megnorm.testing.ranks import run_ranks

LAYOUTS = {
    "accumulated": (1, {}),
    "dp2_zero0": (2, {"parallel__zero_stage": 0}),
    "dp2_zero1": (2, {"parallel__zero_stage": 1}),
    "tp2_dp2_zero2": (4, {"parallel__tp": 2, "parallel__zero_stage": 2}),
    "tp2_dp2_zero3": (4, {"parallel__tp": 2, "parallel__zero_stage": 3}),
    "tp4_sp_kv2": (4, {"parallel__tp": 4, "parallel__sp": True}),
    "cp2_dp2": (4, {"parallel__cp": 2}),
    "pp2_dp2_zero0": (4, {"parallel__pp": 2, "parallel__zero_stage": 0}),
    "tp2_pp2_dp2": (8, {"parallel__tp": 2, "parallel__pp": 2}),
    "pp4_untied": (4, {"parallel__pp": 4, "model__tie_embeddings": False}),
    "recomputed": (2, {"parallel__recompute": "full", "parallel__zero_stage": 3}),
    "two_streams_pp2": (2, {"model__norm": "residual", "parallel__pp": 2}),
    "bf16_dp2": (2, {"train__dtype": "bf16"}),
    "bf16_tp2_pp2_dp2": (8, {"train__dtype": "bf16", "parallel__tp": 2, "parallel__pp": 2}),
    "bf16_dp2_zero3": (2, {"train__dtype": "bf16", "parallel__zero_stage": 3}),
}


def probed(config):
    """Three steps without a learning rate: what the probes of the first and the third saw, and the engine's own
    norm; the second has none."""
    from megnorm.build import build_engine, build_module
    from megnorm.engine.start import start
    from megnorm.parallel.groups import make_groups
    from megnorm.plan.layout import make_layout
    from megnorm.testing.parity import micro_batches, perturb
    from megnorm.worker import make_probes

    device = torch.device("cpu")
    start(device, 120)
    groups = make_groups(make_layout(config, dist.get_world_size()), device, config.model.kv_heads)
    module = build_module(config, groups)
    perturb(module.parameters())
    engine = build_engine(config, groups, module, lambda given: torch.optim.SGD(given, lr=0.0))
    probes, found = make_probes(config, groups, engine), []
    for step in range(1, 4):
        probes.begin(step)
        result = engine.step(micro_batches(config, groups, step), 0.0, step)
        engine.evaluate(micro_batches(config, groups, 99))
        found.append((probes.end(), result.grad_norm))
    return found


def plain(config, step):
    """The same in one process, the whole batch at once: sums of squares over parameters, sizes of block outputs."""
    from megnorm.build import build_module
    from megnorm.config.run import ParallelConfig
    from megnorm.model.block import Block
    from megnorm.parallel.groups import make_groups
    from megnorm.plan.layout import Layout
    from megnorm.testing.parity import global_batch, perturb

    module = build_module(config.model_copy(update={"parallel": ParallelConfig()}),
                          make_groups(Layout(1, 1, 1), torch.device("cpu")))
    perturb(module.parameters())
    tokens, targets, weights = global_batch(config, step)
    module(tokens, targets, weights).backward()
    squares, sizes, x = {}, {}, tokens
    for parameter in module.parameters():
        words = parameter.sharding.name.split(".")
        part = ".".join(words[:3]) if words[0] == "layers" else words[0]
        squares[part] = squares.get(part, 0.0) + float(parameter.grad.double().square().sum())
    with torch.no_grad():
        for layer in module.layers:
            if isinstance(layer, Block) and layer.layer == 0:
                sizes["input"] = x
            x = layer(x)
            if isinstance(layer, Block):
                sizes[f"layers.{layer.layer}"] = x
    streams = 2 if config.model.norm.scheme == "residual" else 1
    return ({part: math.sqrt(square) for part, square in squares.items()},
            {at: [float(part.square().mean().sqrt()) for part in x.chunk(streams, -1)] for at, x in sizes.items()})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_probes_see_the_whole(layout):
    world, changes = LAYOUTS[layout]
    config = tiny_config(**{"model__norm": "hybrid_star", **changes}, observe__probe_every=3, train__clip=0.1)
    tolerance = 5e-2 if config.train.dtype == "bf16" else 1e-5
    ranks = run_ranks(probed, world, config)
    assert all(found == ranks[0] for found in ranks)
    assert ranks[0][1][0] is None
    for step in (1, 3):
        probe, norm = ranks[0][step - 1]
        ((gradients, sizes),) = run_ranks(plain, 1, config, step)
        assert list(probe["residual_rms"]) == ["input", *(f"layers.{n}" for n in range(4))]
        assert probe["grad_norm"] == pytest.approx(gradients, rel=tolerance)
        for at, right in sizes.items():
            got = probe["residual_rms"][at]
            assert (got if isinstance(got, list) else [got]) == pytest.approx(right, rel=tolerance), at
        assert math.sqrt(sum(n * n for n in probe["grad_norm"].values())) == pytest.approx(norm, rel=1e-5)
