"""Schemes that depend on the training step or on the first batch: a broken run resumes bit by bit."""

from pathlib import Path

import numpy as np
import pytest
from small_run import differing, raw_config, rows, run, tensors, write_config
from test_train_resume import train_in_process

from megnorm.testing.ranks import run_ranks

STEPS, SAVED = 9, 4  # a factor still grows where the run breaks
RUNS = {
    "prores over residual, pp2, recomputed": {
        "parallel__pp": 2, "parallel__recompute": "full",
        "model__norm": {"scheme": "prores", "options": {"base": "residual", "steps": 8}}},
    "admin, bf16": {"train__dtype": "bf16", "model__norm": "admin"},
}


@pytest.mark.parametrize("name", RUNS)
def test_resume_is_bit_exact(name: str, data: Path, tmp_path: Path) -> None:
    paths = {}
    for which in ("whole", "broken"):
        raw = raw_config(data, tmp_path / which, model__z_loss=1e-3, observe__tensorboard=False, train__steps=STEPS,
                         checkpoint__every=SAVED, train__eval_every=3, **RUNS[name])
        paths[which] = write_config(tmp_path / f"{which}.yaml", raw)
    assert run_ranks(train_in_process, 2, str(paths["whole"]), None, timeout=240) == [0, 0]
    assert run_ranks(train_in_process, 2, str(paths["broken"]), SAVED + 3, timeout=240) == [-9, -9]
    assert run_ranks(train_in_process, 2, str(paths["broken"]), None, timeout=240) == [0, 0]
    whole, broken = (tensors(tmp_path / which, STEPS) for which in ("whole", "broken"))
    assert differing(whole, broken) == []
    assert rows(tmp_path / "whole") == rows(tmp_path / "broken")
    trained = [row for row in rows(tmp_path / "whole") if "z_loss" in row]
    assert len(trained) == STEPS and all(1e-3 * 3 ** 2 < row["z_loss"] < 1e-3 * 9 ** 2 for row in trained)
    assert trained[-1]["loss"] < trained[0]["loss"]


def test_admins_factors_are_in_the_checkpoint(data: Path, tmp_path: Path) -> None:
    """The first is 1; the second is small with the embedding, whose deviation is 0.1; then they grow. The page
    names the kernels."""
    path = write_config(tmp_path / "config.yaml", raw_config(
        data, tmp_path / "run", model__norm="admin", train__steps=2, train__eval_every=0, schedule__warmup_steps=1))
    command = run(path)
    assert command.code == 0, command.errors
    assert "norm kernels" in command.out and "4 x layer over 32: auto" in command.out
    assert "attention     blocks of queries" in command.out and "products      " in command.out
    factors = {name: value for name, value in tensors(tmp_path / "run", 2).items() if "scale.factor/master" in name}
    means = [float(np.mean(factors[name])) for name in sorted(factors)]
    assert len(means) == 4
    assert means[0] == pytest.approx(1.0, abs=0.01)
    assert means[1] < 0.6 and means[1:] == sorted(means[1:])
