"""Running `megnorm.launcher.launch` in a process of its own, for tests that end, kill and signal it."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
LAUNCH = "import json, sys; from megnorm.launcher import launch; sys.exit(launch(**json.loads(sys.argv[1])))"


class Launched:
    """A launcher running in its own process, and the workers that it started."""

    def __init__(self, spec: str) -> None:
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE"}
        environ.pop("OMP_NUM_THREADS", None)
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, spec], env=environ, stderr=subprocess.PIPE, text=True
        )

    def wait(self, timeout: float = 60.0) -> tuple[int, str]:
        """Exit code and what it wrote to stderr."""
        _, errors = self.process.communicate(timeout=timeout)
        return self.process.returncode, errors

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


def wait_for(condition: Callable[[], bool], seconds: float = 40.0) -> None:
    """Returns as soon as the condition holds; fails after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s in vain"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def worker_pids(folder: Path) -> list[int]:
    """Process ids of the ring workers that have met, by rank."""
    return [int(path.read_text().split()[0]) for path in sorted(folder.glob("pid*")) if path.read_text()]
