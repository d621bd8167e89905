"""A run killed or stopped at any moment and started again is the run that nothing disturbed, bit by bit."""

import os
import signal
from pathlib import Path

import pytest
import torch
from launching import is_running
from small_run import SAVED, STEPS, Command, differing, kill, raw_config, rows, run, tensors, write_config

from megnorm.checkpoint.storage import candidates
from megnorm.testing.ranks import run_ranks


class Died(Exception):
    """Ends a rank in the middle of a run, as a kill would: nothing is saved or closed."""


def train_in_process(path: str, dies_in: int | None) -> int:
    """On every rank: what a worker does, up to the beginning of step ``dies_in``. Returns the exit code."""
    import torch.distributed as dist

    from megnorm.engine.start import start
    from megnorm.loop import StopRequest, train
    from megnorm.parallel.groups import make_groups
    from megnorm.prepare import prepare
    from megnorm.worker import open_run

    def report(progress: str) -> None:
        if progress == f"step {dies_in}":
            raise Died

    prepared = prepare(path, [], dist.get_world_size(), "auto")
    start(torch.device("cpu"), 60)
    groups = make_groups(prepared.layout, torch.device("cpu"), prepared.config.model.kv_heads)
    running = open_run(prepared, "auto", groups, StopRequest())
    try:
        return train(running, report)
    except Died:
        return -9


LAYOUTS = {
    "dp2 bf16": (2, {"train__dtype": "bf16"}),
    "dp2 zero3": (2, {"parallel__zero_stage": 3}),
    "dp2 zero0 bf16": (2, {"parallel__zero_stage": 0, "train__dtype": "bf16"}),
    "tp2": (2, {"parallel__tp": 2}),
    "pp2": (2, {"parallel__pp": 2}),
    "pp2 tp2 bf16, recomputed": (
        4,
        {"parallel__pp": 2, "parallel__tp": 2, "parallel__recompute": "full", "train__dtype": "bf16"},
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_resume_is_bit_exact(name: str, data: Path, tmp_path: Path) -> None:
    world, changes = LAYOUTS[name]
    paths = {}
    for which in ("whole", "broken"):
        raw = raw_config(
            data,
            tmp_path / which,
            train__steps=8,
            checkpoint__every=3,
            checkpoint__keep_last=9,
            train__eval_every=3,
            observe__tensorboard=False,
            **changes,
        )
        paths[which] = str(write_config(tmp_path / f"{which}.yaml", raw))
    assert run_ranks(train_in_process, world, paths["whole"], None) == [0] * world
    assert run_ranks(train_in_process, world, paths["broken"], 6) == [-9] * world
    assert run_ranks(train_in_process, world, paths["broken"], None) == [0] * world
    for step in (3, 6, 8):
        assert not differing(tensors(tmp_path / "whole", step), tensors(tmp_path / "broken", step)), step
    assert rows(tmp_path / "whole") == rows(tmp_path / "broken")
    assert differing(tensors(tmp_path / "whole", 6), tensors(tmp_path / "whole", 8)), "it trains at all"


def test_killed_with_minus_nine_and_continued(data: Path, undisturbed: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "config.yaml", raw_config(data, tmp_path / "run"))
    command = Command(config)
    try:
        command.wait_for_step(tmp_path / "run", 1)
        pids = [process.pid for process in command.everyone()]
        command.wait_for_step(tmp_path / "run", SAVED + 1)
        kill(pids)
    finally:
        command.end()
    done = [row["step"] for row in rows(tmp_path / "run")]
    assert SAVED < done[-1] < STEPS, "it was killed in the middle"
    again = run(config)
    assert again.code == 0, again.errors
    assert f"resumed from {tmp_path}/run/checkpoints/step-00000010" in again.out
    assert "changed since" not in again.out and "passed over" not in again.out
    assert not differing(tensors(tmp_path / "run", STEPS), tensors(undisturbed, STEPS))
    assert rows(tmp_path / "run") == rows(undisturbed)
    steps = [row["step"] for row in rows(tmp_path / "run") if "split" not in row]
    assert steps == list(range(1, STEPS + 1))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_saves_and_the_same_command_continues(
    number: signal.Signals, data: Path, undisturbed: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path / "config.yaml", raw_config(data, tmp_path / "run"))
    command = Command(config)
    try:
        command.wait_for_step(tmp_path / "run", 4)
        pids = [process.pid for process in command.everyone()]
        os.kill(pids[0], number)
        command.wait(60)
    finally:
        command.end()
    last = rows(tmp_path / "run")[-1]["step"]
    assert command.code == 75, command.errors
    assert f"after step {last}; the same command again continues" in command.out
    assert [path.name for path in candidates(tmp_path / "run")][0] == f"step-{last:08d}"
    assert 4 <= last < STEPS, "it stopped in the middle"
    assert not any(is_running(pid) for pid in pids)
    assert "Traceback" not in command.errors and command.errors.count("\n") == 1, command.errors
    again = run(config)
    assert again.code == 0, again.errors
    assert f"checkpoints/step-{last:08d}: " in again.out
    assert not differing(tensors(tmp_path / "run", STEPS), tensors(undisturbed, STEPS))
    assert rows(tmp_path / "run") == rows(undisturbed)
