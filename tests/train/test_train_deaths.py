"""A rank that dies or hangs ends the whole run soon, and is named."""

import os
import re
import signal
import time
from pathlib import Path

from launching import is_running
from small_run import Command, raw_config, write_config

from megnorm.checkpoint.storage import candidates

LONG = {"train__steps": 100000, "train__eval_every": 0, "checkpoint__every": 2}


def test_a_killed_rank_is_named(data: Path, tmp_path: Path) -> None:
    command = Command(write_config(tmp_path / "config.yaml", raw_config(data, tmp_path / "run", **LONG)))
    try:
        command.wait_for_step(tmp_path / "run", 3)
        pids = [process.pid for process in command.everyone()]
        victim = command.workers()[1]
        began = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        command.wait(60)
    finally:
        command.end()
    assert time.monotonic() - began < 30
    assert command.code == 1
    said = rf"rank 1 \(host \S+, pid {victim}\) was killed by SIGKILL after step \d+"
    assert re.search(said, command.errors), command.errors
    assert "rank 0" not in command.errors and "Traceback" not in command.errors
    assert not any(is_running(pid) for pid in pids)
    assert candidates(tmp_path / "run"), "the checkpoints stay"


def test_a_hanging_rank_ends_the_run(data: Path, tmp_path: Path) -> None:
    raw = raw_config(data, tmp_path / "run", **LONG, parallel__timeout_seconds=5)
    command = Command(write_config(tmp_path / "config.yaml", raw))
    try:
        command.wait_for_step(tmp_path / "run", 3)
        pids = [process.pid for process in command.everyone()]
        victim = command.workers()[1]
        os.kill(victim, signal.SIGSTOP)
        began = time.monotonic()
        command.wait(60)
    finally:
        command.end()
    assert time.monotonic() - began < 30
    assert command.code == 1
    assert not any(is_running(pid) for pid in pids)
    said = rf"megnorm: rank 1 \(host \S+, pid {victim}\) failed after step \d+: it hung"
    assert re.match(said, command.errors), command.errors
    assert "rank 0" not in command.errors and "Traceback" not in command.errors
