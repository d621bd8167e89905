"""Sweeps without training: cells from files, refusals, and running, retrying, resuming stand-ins of runs."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

from megnorm.config import load_config
from megnorm.plan.schedule import learning_rate
from megnorm.scaling.cells import (
    LOST_SECONDS,
    Status,
    progress,
    read_cells,
    read_status,
    result_rows,
    write_status,
)
from megnorm.scaling.commands import scripts, sweep_command
from megnorm.scaling.errors import ScalingError
from megnorm.scaling.results import read_results
from megnorm.scaling.run import Runner, run_all
from megnorm.scaling.slurm import levels
from megnorm.scaling.sweep import plan_cells, write_cells
from megnorm.scaling.tables import plan_table

BASE = {
    "run_dir": "unused",
    "model": {"layers": 2, "hidden": 32, "heads": 4, "vocab_size": 256},
    "data": {"sequence_length": 32, "train": "nowhere/train"},
    "train": {"steps": 10, "micro_batch": 1, "global_batch": 2},
    "optimizer": {"lr": 1e-3},
}
# What stands for `megnorm train`: notes its call, follows `plan`, one exit code an attempt.
STAND_IN = """
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1]).parent
plan = (folder.parent.parent / "plan" / folder.name)
codes = plan.read_text().split() if plan.exists() else ["0"]
with open(folder / "calls", "a") as calls:
    calls.write(" ".join(sys.argv[2:]) + "\\n")
attempt = len((folder / "calls").read_text().splitlines())
print("megnorm: broken attempt", attempt, flush=True)
code = codes[min(attempt, len(codes)) - 1]
if code == "wait":
    import signal
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    (folder / "up").touch()
    time.sleep(60)
(folder / "checkpoints" / "step-00000001").mkdir(parents=True, exist_ok=True)
sys.exit(int(code))
"""


def same(config):
    return config


@pytest.fixture
def sweep_file(tmp_path: Path):
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(BASE))

    def write(**changes) -> Path:
        raw = {"base": "base.yaml", "dir": str(tmp_path / "sweep"), **changes}
        (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(raw, sort_keys=False))
        return tmp_path / "sweep.yaml"

    return write


def made(path: Path):
    sweep, planned = plan_cells(path, same)
    write_cells(sweep.dir, sweep, planned)
    return [cell for cell, _ in planned]


def runner(tmp_path: Path) -> Runner:
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    return Runner(os.environ, lambda text: None, lambda cell: [sys.executable, str(tmp_path / "stand_in.py")])


def behave(tmp_path: Path, name: str, codes: str) -> None:
    (tmp_path / "sweep" / "plan").mkdir(parents=True, exist_ok=True)
    (tmp_path / "sweep" / "plan" / name).write_text(codes)


def test_a_grid_and_further_cells(sweep_file) -> None:
    path = sweep_file(
        set={"train.global_batch": 4},
        axes={
            "size": {"s": {"model.layers": 1}, "m": {"model.layers": 3, "model.hidden": 64}},
            "optimizer.lr": [1e-3, 3e-4],
            "scheme": {
                "pre": {"model.norm": "pre"},
                "mix": {"model.norm": {"scheme": "mix_ln", "options": {"fraction": 0.5}}},
            },
        },
        cells=[{"name": "extra", "seed": 7, "train.tokens": 640}],
    )
    _, planned = plan_cells(path, same)
    cells = {cell.name: (cell, config) for cell, config in planned}
    assert len(cells) == 9 and list(cells)[0] == "s_0.001_pre" and list(cells)[-1] == "extra"
    cell, config = cells["m_0.0003_mix"]
    assert config.model.layers == 3 and config.optimizer.lr == 3e-4 and config.train.global_batch == 4
    assert config.model.norm.options == {"fraction": 0.5} and cell.scheme == "mix" and cell.labels["size"] == "m"
    assert config.run_dir == cell.folder
    extra, config = cells["extra"]
    assert config.train.steps is None and extra.steps == 5 and extra.seed == 7


def test_labels_may_look_like_numbers(sweep_file) -> None:
    rates = {1e-3: {"optimizer.lr": 1e-3}, 2e6: {"optimizer.lr": 2e-3}, 7: {"optimizer.lr": 7e-3}}
    assert [cell.labels for cell in made(sweep_file(axes={"rate": rates}))] == [
        {"rate": "0.001"}, {"rate": "2e6"}, {"rate": "7"}]


def test_derived_keys(sweep_file) -> None:
    path = sweep_file(
        set={"tokens_per_parameter": 2, "warmup_share": 0.1, "decay_share": 0.25, "schedule.kind": "wsd"},
        axes={"model.layers": [1, 3]},
    )
    for cell, config in plan_cells(path, same)[1]:
        assert config.train.tokens == 2 * cell.parameters
        assert config.schedule.warmup_steps == round(0.1 * cell.steps)
        assert config.schedule.decay_steps == round(0.25 * cell.steps)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"axis": {}}, "unknown key 'axis'; did you mean 'axes'?"),
        ({"axes": {"model.layrs": [1]}}, "cell 1: config: unknown key 'model.layrs'; did you mean 'layers'?"),
        ({"axes": {"model.layers": []}}, "the axis model.layers has no values"),
        ({"axes": {"model.norm": [{"scheme": "pre"}]}}, "needs a label"),
        ({}, "there is nothing to sweep"),
        ({"axes": {"seed": [1]}, "cells": [{"name": "1"}]}, "two cells are called 1"),
        ({"axes": {"parallel.tp": [3]}, "nproc": 3}, "cell 3: model.heads=4 is not divisible by parallel.tp=3"),
        ({"axes": {"parallel.tp": [2]}}, "cell 2: a world of 1 processes doesn't fit parallel.tp=2"),
        ({"axes": {"schedule.warmup_steps": [20]}}, "cell 20: schedule: warm-up 20"),
        ({"axes": {"seed": [1]}, "cost": {"prise": 1}}, "unknown key 'cost.prise'; did you mean 'price'?"),
        ({"axes": {"seed": [1]}, "retries": -1}, "retries=-1"),
        (
            {"axes": {"seed": [1]}, "set": {"tokens_per_parameter": 0}},
            "tokens_per_parameter=0 must be a number above 0",
        ),
        ({"axes": {"seed": [1, 2]}, "share_trunk": True}, "needs schedule.kind=wsd"),
        (
            {"axes": {"seed": [1, 2]}, "share_trunk": True, "set": {"schedule.kind": "wsd", "schedule.decay_steps": 2}},
            "no two cells that differ only",
        ),
    ],
)
def test_bad_sweeps_are_one_clear_message(sweep_file, changes: dict, said: str) -> None:
    with pytest.raises(ScalingError) as caught:
        plan_cells(sweep_file(**changes), same)
    assert said in str(caught.value), str(caught.value)


def test_a_missing_file_names_its_neighbour(tmp_path: Path, sweep_file) -> None:
    sweep_file(axes={"seed": [1]})
    with pytest.raises(ScalingError, match=r"did you mean .*sweep\.yaml"):
        plan_cells(tmp_path / "sweeep.yaml", same)


def test_dry_run_writes_nothing_and_sums_costs(tmp_path: Path, sweep_file, capsys) -> None:
    path = sweep_file(axes={"seed": [1, 2]}, cost={"tflops": 1e-6, "price": 2.0})
    assert sweep_command([str(path)], "local", 1, True, "", same, {}, 1) == 0
    said = capsys.readouterr().out
    assert "megnorm train --nproc 1" in said and not (tmp_path / "sweep").exists()
    sweep, planned = plan_cells(path, same)
    cell = planned[0][0]
    hours = 2 * cell.steps * cell.flops_per_step / 1e6 / 3600
    rows = plan_table([cell for cell, _ in planned], sweep)
    assert list(rows.columns[-1].cells)[-1] == f"${2 * hours:,.2f}"
    assert "#SBATCH --array=0-1%1" in scripts([cell for cell, _ in planned], sweep, "slurm", 1)[0]


def test_done_stays_failed_is_retried_to_a_limit(tmp_path: Path, sweep_file) -> None:
    cells = made(sweep_file(axes={"seed": [1, 2, 3, 4]}, retries=2))
    behave(tmp_path, "2", "1 1 0")
    behave(tmp_path, "3", "1")
    behave(tmp_path, "4", "2")
    assert not run_all(cells, runner(tmp_path), 2)
    states = {cell.name: read_status(cell.path) for cell in cells}
    assert [states[name].state for name in "1234"] == ["done", "done", "failed", "failed"]
    assert [states[name].attempts for name in "1234"] == [1, 3, 3, 1]
    assert states["3"].error == "megnorm: broken attempt 3" and states["3"].failures == 3
    assert states["2"].error == "" and states["4"].exit_code == 2
    behave(tmp_path, "4", "2 0")  # a user's error, mended
    run_all(cells, runner(tmp_path), 1)
    assert [read_status(cell.path).attempts for cell in cells] == [1, 3, 3, 2]
    assert read_status(cells[3].path).state == "done"


def test_a_signal_stops_and_the_next_call_continues(tmp_path: Path, sweep_file) -> None:
    cells = made(sweep_file(axes={"seed": [1, 2]}))
    behave(tmp_path, "1", "wait 0")
    first = runner(tmp_path)
    thread = threading.Thread(target=run_all, args=(cells, first, 1))
    thread.start()
    wait_until(lambda: (cells[0].path / "up").exists())
    assert read_status(cells[0].path).state == "running"
    first._hand_on(signal.SIGUSR1, None)
    thread.join(20)
    assert [read_status(cell.path).state for cell in cells] == ["stopped", "pending"]
    assert run_all(cells, runner(tmp_path), 1)
    assert [read_status(cell.path).failures for cell in cells] == [0, 0]


def test_two_never_run_one_cell(tmp_path: Path, sweep_file) -> None:
    (cell,) = made(sweep_file(axes={"seed": [1]}))
    behave(tmp_path, "1", "wait 0")
    code = (
        "import sys; from megnorm.scaling.run import Runner; from megnorm.scaling.cells import read_cell; import os;"
        "Runner(os.environ, print).run(read_cell(sys.argv[1]), [sys.executable, sys.argv[2]])"
    )
    one = runner(tmp_path)
    outer = subprocess.Popen([sys.executable, "-c", code, cell.folder, str(tmp_path / "stand_in.py")])
    wait_until(lambda: (cell.path / "up").exists())
    assert one.run(cell) == 75 and len((cell.path / "calls").read_text().splitlines()) == 1
    outer.kill()  # the run itself lives on, and still holds the cell
    outer.wait()
    assert one.run(cell) == 75
    os.kill(read_status(cell.path).pid, signal.SIGTERM)
    wait_until(lambda: one.run(cell) == 0)
    assert read_status(cell.path).attempts == 2


def test_a_run_without_heartbeat_is_lost(tmp_path: Path) -> None:
    write_status(tmp_path, Status(state="running"))
    assert not read_status(tmp_path).lost
    old = time.time() - LOST_SECONDS - 5
    os.utime(tmp_path / "status.json", (old, old))
    assert read_status(tmp_path).lost and not read_status(tmp_path).over(2)


def test_a_changed_cell_is_refused_once_it_ran(tmp_path: Path, sweep_file) -> None:
    cells = made(sweep_file(axes={"seed": [1, 2]}))
    made(sweep_file(axes={"seed": [1, 2]}, set={"optimizer.lr": 2e-3}))  # nothing ran yet
    run_all(cells[:1], runner(tmp_path), 1)
    made(sweep_file(axes={"seed": [1, 2]}, set={"optimizer.lr": 2e-3, "observe.log_every": 5}))
    with pytest.raises(ScalingError, match=r"cell 1 has run with other values:\n  optimizer.lr: 0.002 -> 0.003"):
        made(sweep_file(axes={"seed": [1, 2]}, set={"optimizer.lr": 3e-3}))


WSD = {"schedule.kind": "wsd", "decay_share": 0.2, "schedule.warmup_steps": 2}


def test_budgets_share_their_trunk(tmp_path: Path, sweep_file) -> None:
    path = sweep_file(axes={"train.steps": [10, 20, 40], "seed": [1, 2]}, set=WSD, share_trunk=True)
    sweep, planned = plan_cells(path, same)
    cells = {cell.name: cell for cell, _ in planned}
    assert len(cells) == 10
    first, second = cells["10_1.trunk"], cells["20_1.trunk"]
    assert (first.steps, first.parent, second.steps, second.first_step) == (8, None, 16, 8)
    assert second.parent == first.folder
    assert [cells[f"{steps}_1"].parent for steps in (10, 20, 40)] == [first.folder, second.folder, second.folder]
    assert sum(cell.steps - cell.first_step for cell in cells.values()) == 2 * (8 + 2 + 8 + 4 + 24)
    assert [len(level) for level in levels([cell for cell, _ in planned])] == [2, 4, 4]
    configs = {cell.name: config for cell, config in planned}
    for step in range(16):  # the rate of the trunk is that of every run through it
        rates = {learning_rate(configs[name], step) for name in ("20_1.trunk", "20_1", "40_1")}
        assert len(rates) == 1
    write_cells(sweep.dir, sweep, planned)
    behave(tmp_path, "20_1.trunk", "1 1 1 1")
    run_all([cell for cell, _ in planned], runner(tmp_path), 2)
    assert (cells["10_1"].path / "calls").read_text() == f"--resume {first.folder}\n"
    assert read_status(cells["40_1"].path).state == "pending" and read_status(cells["40_2"].path).state == "done"


def test_after_a_stop_a_branch_goes_on_from_its_own_checkpoint(tmp_path: Path, sweep_file) -> None:
    cells = made(sweep_file(axes={"train.steps": [10, 20]}, set=WSD, share_trunk=True))
    behave(tmp_path, "10", "75 0")
    run_all(cells, runner(tmp_path), 1)
    run_all(cells, runner(tmp_path), 1)
    assert (cells[1].path / "calls").read_text() == f"--resume {cells[0].folder}\n--resume auto\n"


def test_results_are_derived_from_the_run_directories(tmp_path: Path, sweep_file) -> None:
    cells = made(sweep_file(axes={"seed": [1, 2, 3]}))
    rows = [[(5, 4.0), (10, 3.0), ("valid", 3.5)], [(5, 4.0)], [(5, float("nan"))]]
    states = [Status("done", 1, seconds=7200), Status("running", 1), Status("failed", 1, 1, error="diverged")]
    for cell, lines, status in zip(cells, rows, states, strict=True):
        write_status(cell.path, status)
        with open(cell.path / "metrics.jsonl", "w") as file:
            for step, loss in lines:
                row = {"step": 10, "split": "valid", "loss": loss} if step == "valid" else {"step": step, "loss": loss}
                if loss != loss:
                    row.update(loss=None, nonfinite={"loss": "nan"})
                file.write(json.dumps(row) + "\n")
    assert progress(cells[0]) == (10, 3.5)
    one, two, three = result_rows(tmp_path / "sweep")
    assert (one["loss"], one["state"], one["device_hours"], one["tokens"]) == (3.5, "done", 2.0, 640)
    assert two["loss"] is None and three["loss"] != three["loss"] and three["error"] == "diverged"
    assert [cell.name for cell in read_cells(tmp_path / "sweep")] == ["1", "2", "3"]


def test_status_prints_states_and_errors(tmp_path: Path, sweep_file, capsys) -> None:
    path = sweep_file(axes={"seed": [1, 2]}, retries=0)
    behave(tmp_path, "2", "1")
    run_all(made(path), runner(tmp_path), 1)
    assert sweep_command(["status", str(path)], "local", 1, False, "", same, {}, 1) == 0
    said = capsys.readouterr().out
    assert "1 done, 1 failed" in said and "broken attempt 1" in said


def test_the_written_configuration_is_the_planned_one(sweep_file) -> None:
    path = sweep_file(axes={"seed": [5]}, set={"model.norm": "hybrid_star"})
    made(path)
    ((cell, config),) = plan_cells(path, same)[1]
    assert load_config(cell.config) == config


def wait_until(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_kept_results_are_those_of_the_tiny_sweep() -> None:
    """The README's numbers come from runs of the configuration that is there now."""
    root = Path(__file__).resolve().parents[2] / "configs" / "sweeps"
    _, planned = plan_cells(
        root / "tiny.yaml", lambda config: config.model_copy(update={"model": config.model.model_copy(
            update={"vocab_size": 4096})}))
    kept = {run.name: run for run in read_results(root / "results" / "tiny.json")[0]}
    cells = {cell.name: cell for cell, _ in planned if not cell.trunk}
    assert len(cells) == 36 and kept.keys() == cells.keys()
    for name, cell in cells.items():
        run = kept[name]
        assert (run.parameters, run.tokens, run.lr, run.scheme) == (cell.parameters, cell.tokens, cell.lr, cell.scheme)
