"""What is sent in a step is what the plan says, but for the engine's own few bytes: the gradient norm, and with tp the
descriptions of the parts of what stages send."""

import pytest
from test_faults import MIXED
from tiny import tiny_config

from megnorm.plan.communication import volumes
from megnorm.plan.layout import make_layout
from megnorm.testing.ranks import run_ranks
from megnorm.testing.volume import measured_step

EXPERTS = {"experts": 4, "top_k": 2, "ffn_hidden": 16, "layers": "every 2"}
LAYOUTS = {
    "tp2": (2, {"parallel__tp": 2}), "tp2 sp": (2, {"parallel__tp": 2, "parallel__sp": True}),
    "tp2, experts": (2, {"parallel__tp": 2, "model__moe": {**EXPERTS, "shared_experts": 1}}),
    "tp2 sp, experts": (2, {"parallel__tp": 2, "parallel__sp": True, "model__moe": EXPERTS}),
    "cp2": (2, {"parallel__cp": 2}), "tp2 pp2": (4, {"parallel__tp": 2, "parallel__pp": 2}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_volume_is_as_planned(layout):
    world, changes = LAYOUTS[layout]
    config = tiny_config("hybrid_star" if "sp" in layout else MIXED, train__micro_batch=1, **changes)
    for rank in run_ranks(measured_step, world, config, 3):
        planned = volumes(config, make_layout(config, world), rank["stage"])
        assert planned
        for key, size in planned.items():
            assert 0 <= rank["sent"][key] - size <= 1024, (key, rank["sent"][key], size)


def test_copies_of_tokens_to_experts_and_back():
    """How many a rank sends back is a matter of chance; what the ranks of a group send together is not."""
    config = tiny_config(model__moe=EXPERTS, parallel__ep=2, train__micro_batch=1)
    layout = make_layout(config, 2)
    sent = sum(rank["sent"]["ep", "all_to_all"] for rank in run_ranks(measured_step, 2, config, 3))
    assert sent == 2 * volumes(config, layout, 0)["ep", "all_to_all"]
    micro_batches, layers, tokens, experts = 4, 2, 16, 4
    assert sent == 2 * micro_batches * layers * (4 * 2 * tokens * 32 * 4 + experts * 8)
