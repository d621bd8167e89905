"""Running cells on this machine: one at a time (`megnorm sweep run CELL`), or all of a sweep side by side."""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import IO

from megnorm.scaling.cells import (
    DONE,
    HEARTBEAT_SECONDS,
    STOPPED,
    USER_ERROR,
    Cell,
    Status,
    has_checkpoint,
    last_words,
    read_cell,
    read_status,
    write_status,
)

FAILED = 1
KILLED_BY_HAND = 130  # exit code of `megnorm train` after a second interrupt
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Runner:
    """Runs cells and hands signals on to them.

    environ: the environment that they get; say: takes what happens, in words; launcher: the start of a command.
    """

    def __init__(
        self, environ: Mapping[str, str], say: Callable[[str], None], launcher: Callable | None = None
    ) -> None:
        self.environ, self.say, self.launcher = environ, say, launcher or local_launcher
        self.stopping = False
        self._running: dict[str, subprocess.Popen] = {}
        self._guard = threading.Lock()

    def install(self) -> None:
        """Take over the signals of this process: from the main thread."""
        for number in SIGNALS:
            signal.signal(number, self._hand_on)

    def _hand_on(self, number: int, _frame: object) -> None:
        self.stopping = True
        for process in list(self._running.values()):
            if process.poll() is None:
                process.send_signal(number)

    def run(self, cell: Cell, launcher: list[str] | None = None, job: str = "") -> int:
        """Start or continue a cell. 0 done; 75 to be called again (stopped, failed with tries left, busy, or
        its parent not done); 2 a user's error; 1 failed for good. launcher: what to start instead of
        ``self.launcher(cell)``; the configuration's path and --resume are added to it.
        """
        with open(cell.path / "lock", "a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.say(f"{cell.name}: another process runs it")
                return STOPPED
            status = read_status(cell.path)
            if status.over(cell.retries):
                return DONE if status.state == "done" else FAILED
            if cell.parent is not None and read_status(Path(cell.parent)).state != "done":
                self.say(f"{cell.name}: waits for {Path(cell.parent).name}")
                return STOPPED
            return self._attempt(cell, status, launcher or self.launcher(cell), job, lock)

    def _attempt(self, cell: Cell, status: Status, launcher: list[str], job: str, lock: IO) -> int:
        resume = cell.parent if cell.parent and not has_checkpoint(cell.path) else "auto"
        command = [*launcher, str(cell.config), "--resume", resume]
        began = time.monotonic()
        with open(cell.path / "log.txt", "ab") as log:
            log.write(f"---- attempt {status.attempts + 1}: {' '.join(command)}\n".encode())
            log.flush()
            # The lock is handed down: it stays held as long as the run lives, whatever becomes of this one.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=dict(self.environ),
                pass_fds=(lock.fileno(),),
            )
            with self._guard:
                self._running[cell.name] = process
            if self.stopping:
                process.send_signal(signal.SIGTERM)
            status = write_status(
                cell.path,
                replace(
                    status,
                    state="running",
                    attempts=status.attempts + 1,
                    job=job,
                    host=socket.gethostname(),
                    pid=process.pid,
                ),
            )
            code = self._wait(process, cell.path / "status.json")
        with self._guard:
            del self._running[cell.name]
        return self._note_end(cell, status, code, time.monotonic() - began)

    @staticmethod
    def _wait(process: subprocess.Popen, heart: Path) -> int:
        while True:
            try:
                return process.wait(HEARTBEAT_SECONDS)
            except subprocess.TimeoutExpired:
                os.utime(heart)

    def _note_end(self, cell: Cell, status: Status, code: int, seconds: float) -> int:
        status = replace(status, seconds=status.seconds + seconds, exit_code=code)
        if code == DONE:
            write_status(cell.path, replace(status, state="done", error=""))
            self.say(f"{cell.name}: done after {seconds:.0f} s")
            return DONE
        if code in (STOPPED, KILLED_BY_HAND) or self.stopping:
            write_status(cell.path, replace(status, state="stopped"))
            self.say(f"{cell.name}: stopped, continues when called again")
            return STOPPED
        failures = status.failures + (code != USER_ERROR)
        error = last_words(cell.path / "log.txt")
        write_status(cell.path, replace(status, state="failed", failures=failures, error=error))
        again = failures <= cell.retries and code != USER_ERROR
        tries = "to be tried again" if again else "not tried again"
        self.say(f"{cell.name}: failed (exit code {code}, {tries}): {error}")
        return STOPPED if again else USER_ERROR if code == USER_ERROR else FAILED


def local_launcher(cell: Cell) -> list[str]:
    """`megnorm train` on this machine."""
    return [sys.executable, "-m", "megnorm", "train", "--nproc", str(cell.nproc)]


def run_all(cells: list[Cell], runner: Runner, parallel: int) -> bool:
    """Run what is not over, ``parallel`` cells at a time, parents first; returns whether all are done.

    A failed cell goes to the end of the queue while it has tries left; a user's error is tried once a call.
    """
    waiting = [cell for cell in cells if not read_status(cell.path).over(cell.retries)]
    running: dict[Future, Cell] = {}
    with ThreadPoolExecutor(parallel) as pool:
        while True:
            ready = [cell for cell in waiting if _parent_done(cell)]
            for cell in ready[: parallel - len(running)] if not runner.stopping else []:
                waiting.remove(cell)
                running[pool.submit(runner.run, cell)] = cell
            if not running:
                break
            ended, _ = wait(running, timeout=1.0, return_when=FIRST_COMPLETED)
            for future in ended:
                cell = running.pop(future)
                if future.result() == STOPPED and read_status(cell.path).state == "failed":
                    waiting.append(cell)
    return all(read_status(cell.path).state == "done" for cell in cells)


def run_one(folder: str, launcher: list[str], job: str, environ: Mapping[str, str]) -> int:
    """`megnorm sweep run FOLDER`: the exit code."""
    runner = Runner(environ, print)
    runner.install()
    return runner.run(read_cell(folder), launcher or None, job)


def _parent_done(cell: Cell) -> bool:
    return cell.parent is None or read_status(Path(cell.parent)).state == "done"
