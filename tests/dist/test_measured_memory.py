"""The plan's memory within 10 % of what steps of the real engine hold (tools/bench_memory.py has more cases)."""

import pytest
from tiny import tiny_config

from megnorm.plan.layout import make_layout
from megnorm.plan.memory import stage_memory
from megnorm.testing.memory import measure_step
from megnorm.testing.ranks import run_ranks

SIZES = {"model__hidden": 128, "model__ffn_hidden": 384, "model__vocab_size": 2000, "model__pad_vocab_to": 128,
         "data__sequence_length": 128, "train__micro_batch": 2}


@pytest.mark.parametrize("world, changes", [
    (1, {"parallel__zero_stage": 0, "parallel__recompute": "full"}),
    (2, {"parallel__zero_stage": 2}),
    (2, {"parallel__zero_stage": 3, "train__dtype": "bf16"}),
    (2, {"parallel__tp": 2, "parallel__sp": True, "train__dtype": "bf16"}),
    (2, {"parallel__pp": 2}),
    (2, {"parallel__ep": 2, "model__moe": {"experts": 8, "top_k": 2, "ffn_hidden": 192}}),
])
def test_estimate_is_close_to_the_measured_peak(world: int, changes: dict) -> None:
    """What gloo's threads release late is seen late: a measured peak may be too large, never too small. So the least
    of up to six measurements counts."""
    config = tiny_config("hybrid_star", **SIZES, **changes)
    layout = make_layout(config, world)
    estimates = [stage_memory(config, layout, layout.coordinates(rank).pp, "cpu") for rank in range(world)]
    right = [estimate.total - estimate.bucket for estimate in estimates]
    least = [float("inf")] * world
    for _ in range(6):
        measured = run_ranks(measure_step, world, config, timeout=300.0)
        for one, estimate in zip(measured, estimates, strict=True):
            assert one.bucket == estimate.bucket
            assert one.between < one.peak == sum(one.tensors) - sum(t for t in one.tensors if t >= 1e9)
        least = [min(one, other.peak) for one, other in zip(least, measured, strict=True)]
        if right == pytest.approx(least, rel=0.1):
            return
    assert right == pytest.approx(least, rel=0.1), estimates
