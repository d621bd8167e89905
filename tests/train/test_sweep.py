"""Sweeps that train: trunks give bit-equal runs, a fake cluster runs the generated script, all ends in a report."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import small_run
import yaml
from launching import ROOT

from megnorm.checkpoint.storage import checkpoints_dir
from megnorm.observe.metrics import read_metrics
from megnorm.scaling.cells import read_cells, read_status

SLURM = ROOT / "tests" / "train" / "fake_slurm.sh"


def write_sweep(folder: Path, data: Path, **changes) -> Path:
    raw = small_run.raw_config(
        data, folder / "unused", train__steps=8, train__eval_every=4, checkpoint__every=0, observe__tensorboard=False
    )
    raw["schedule"] = {"kind": "wsd", "warmup_steps": 2, "decay_steps": 2}
    small_run.write_config(folder / "base.yaml", raw)
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump({"base": "base.yaml", "dir": str(folder / "sweep"), **changes}, sort_keys=False))
    return path


def megnorm(*arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
    import os

    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environ}
    return subprocess.run(
        [sys.executable, "-m", "megnorm", *map(str, arguments)], env=env, capture_output=True, text=True, timeout=280
    )


def test_a_run_from_the_trunk_equals_the_run_in_one_go(data: Path, tmp_path: Path) -> None:
    path = write_sweep(tmp_path, data, axes={"train.steps": [6, 8]}, share_trunk=True)
    done = megnorm("sweep", path)
    assert done.returncode == 0, done.stdout + done.stderr
    whole = tmp_path / "whole"
    (command,) = [small_run.run(tmp_path / "base.yaml", f"run_dir={whole}", nproc=1)]
    assert command.code == 0, command.errors
    branch = [row for row in read_metrics(tmp_path / "sweep" / "cells" / "8") if "split" not in row]
    expected = [row for row in read_metrics(whole) if "split" not in row][4:]
    assert [row["step"] for row in branch] == [5, 6, 7, 8]
    for name in ("loss", "grad_norm", "lr", "data"):
        assert [row[name] for row in branch] == [row[name] for row in expected], name
    again = megnorm("sweep", path)
    assert again.returncode == 0 and "done after" not in again.stdout
    assert [read_status(cell.path).attempts for cell in read_cells(tmp_path / "sweep")] == [1, 1, 1]


def test_a_diverged_cell_is_named_and_left_out(data: Path, tmp_path: Path) -> None:
    path = write_sweep(tmp_path, data, axes={"optimizer.lr": [1e-3, 1e30]}, retries=0)
    done = megnorm("sweep", path)
    assert done.returncode == 1 and "raise `retries`" in done.stdout and "loss" in done.stdout
    fit = megnorm("fit", tmp_path / "sweep")
    assert fit.returncode == 2 and fit.stderr.count("\n") == 1 and "1 size of model can't carry" in fit.stderr
    report = megnorm("report", tmp_path / "sweep")
    assert report.returncode == 0 and "<td>1e30</td>" in (tmp_path / "sweep" / "report.html").read_text()


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """Stand-ins of Slurm's commands in a folder for PATH."""
    folder = tmp_path / "slurm-bin"
    folder.mkdir()
    for name in ("sbatch", "srun", "scontrol", "squeue"):
        (folder / name).write_text(f'#!/usr/bin/env bash\nexec bash "{SLURM}" {name} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


def test_a_cluster_runs_the_array_and_requeues(data: Path, tmp_path: Path, cluster: Path) -> None:
    import os

    path = write_sweep(
        tmp_path,
        data,
        axes={"seed": [1, 2]},
        set={"checkpoint.every": 2},
        slurm={"time": "1:00:00", "options": ["--partition=cpu"]},
    )
    environ = {"PATH": f"{cluster}:{os.environ['PATH']}", "FAKE_SLURM": str(tmp_path / "state")}
    done = megnorm("sweep", path, "--backend", "slurm", "--max-parallel", "2", FAKE_SIGNAL_TASK="1", **environ)
    assert done.returncode == 0, done.stdout + done.stderr
    script = (tmp_path / "sweep" / "slurm" / "level-0.sbatch").read_text()
    assert "#SBATCH --partition=cpu" in script and "--signal=USR1@300" in script
    cells = read_cells(tmp_path / "sweep")
    statuses = [read_status(cell.path) for cell in cells]
    assert [status.state for status in statuses] == ["done", "done"], (tmp_path / "state" / "log").read_text()
    assert [status.attempts for status in statuses] == [1, 2]  # task 1 got USR1, saved, and was requeued
    assert statuses[1].job and (tmp_path / "state" / "requeued").read_text().split() == [statuses[1].job]
    steps = [row["step"] for row in read_metrics(cells[1].path) if "split" not in row]
    assert steps == list(range(1, 9)) and checkpoints_dir(cells[1].path).is_dir()
    again = megnorm("sweep", path, "--backend", "slurm", **environ)
    assert "2 cells are over or already in the queue" in again.stdout
    assert json.loads((cells[0].path / "queued.json").read_text()) == {"job": "100", "task": 0}
