"""A checkpoint written in one layout goes on in another, on the same stream of samples, as if nothing had changed."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from small_run import SAVED, STEPS, raw_config, rows, write_config
from test_train_resume import train_in_process

from megnorm.testing.ranks import run_ranks

LAYOUTS = {
    "one process": (1, {}),
    "dp4 zero3": (4, {"parallel__zero_stage": 3}),
    "tp2 with sp": (2, {"parallel__tp": 2, "parallel__sp": True}),
    "tp4, more than kv heads": (4, {"parallel__tp": 4, "parallel__zero_stage": 0}),
    "pp2": (2, {"parallel__pp": 2}),
    "tp2 pp2": (4, {"parallel__tp": 2, "parallel__pp": 2}),
    "cp2": (2, {"parallel__cp": 2}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_layout_goes_on(layout: str, data: Path, undisturbed: Path, tmp_path: Path) -> None:
    world, changes = LAYOUTS[layout]
    folder = f"step-{SAVED:08d}"
    shutil.copytree(undisturbed / "checkpoints" / folder, tmp_path / "run" / "checkpoints" / folder)
    config = write_config(tmp_path / "config.yaml", raw_config(data, tmp_path / "run", **changes))
    assert run_ranks(train_in_process, world, str(config), None) == [0] * world
    expected, got = ([row for row in rows(run) if "split" not in row][-(STEPS - SAVED):]
                     for run in (undisturbed, tmp_path / "run"))
    assert [row["step"] for row in got] == list(range(SAVED + 1, STEPS + 1))
    assert [row["data"] for row in got] == [row["data"] for row in expected]
    for key in ("loss", "grad_norm", "lr"):
        np.testing.assert_allclose([row[key] for row in got], [row[key] for row in expected], rtol=1e-5, err_msg=key)
