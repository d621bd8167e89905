"""Rows of several documents, masked and with positions of their own: every layout equals one process."""

import pytest
from test_layouts import check
from tiny import tiny_config

ASKED = {"data__mask_documents": True, "data__reset_positions": True}
LAYOUTS = {
    "dp2_zero3": (2, {"parallel__zero_stage": 3}),
    "tp2_sp": (2, {"parallel__tp": 2, "parallel__sp": True}),
    "cp2_recompute_selective": (2, {"parallel__cp": 2, "parallel__recompute": "selective"}),
    "pp2_recompute": (2, {"parallel__pp": 2, "parallel__recompute": "full"}),
    "tp2_pp2": (4, {"parallel__tp": 2, "parallel__pp": 2}),  # the engine cuts what stages send over tensor ranks
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout(layout):
    world, changes = LAYOUTS[layout]
    check(world, tiny_config(**ASKED, **changes))
