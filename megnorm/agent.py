"""One machine's agent: torch's elastic agent with our rules for signals, dead ranks and what is printed.

Torch's own agent ends the workers itself when a signal arrives, gives the healthy ranks 30 s after a death,
and prints a page per failure. Here signals go to the workers, which save and end; a death ends all ranks on
all machines within seconds; and one message says which rank was first and why. The machines' agents tell
each other of a death through the rendezvous store.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import DistError, Store
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from megnorm.exits import (
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    EXIT_NO_SPACE,
    EXIT_OK,
    EXIT_STOPPED,
    EXIT_USER_ERROR,
)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
POLL_SECONDS = 0.2
SETTLE_SECONDS = 2.0  # after a death: for the other ranks to end by themselves and for the machines to talk
LOST_STORE_SECONDS = 10.0  # how long workers may go on after node 0's agent can't be reached
STRAGGLER_SECONDS = 60.0  # how long the last ranks may take to end after the first ended in good order
SILENT = "it hung: the other ranks waited for it for parallel.timeout_seconds"


@dataclass(frozen=True)
class Failure:
    """How one rank ended. exitcode < 0 is a signal's number; time in seconds since the epoch."""

    rank: int
    host: str
    pid: int
    exitcode: int
    time: float
    message: str = ""
    trace: str = ""
    lost_peer: bool = False
    progress: str = ""

    def describe(self) -> str:
        """One line for people: which rank, where, how far, why."""
        where = f"rank {self.rank} (host {self.host}, pid {self.pid})"
        after = f" after {self.progress}" if self.progress else ""
        if self.message:
            return f"{where} failed{after}: {self.message}"
        if self.exitcode < 0:
            name = signal.Signals(-self.exitcode).name
            hint = "; if nobody killed it, memory ran out" if name == "SIGKILL" else ""
            return f"{where} was killed by {name}{after}{hint}"
        return f"{where} ended with exit code {self.exitcode}{after}, without a message"


def first_failure(failures: Sequence[Failure]) -> Failure:
    """The cause among its echoes: a rank that only lost its peers comes last, a silent death first."""
    return min(failures, key=lambda f: (f.lost_peer, bool(f.message), f.time))


class FreePortRendezvous(StaticTCPRendezvous):
    """Static rendezvous that may listen on port 0, and tells the workers which port it got."""

    def next_rendezvous(self) -> RendezvousInfo:
        """The next meeting of all launchers, with the port that the store really has."""
        info = super().next_rendezvous()
        store_info = RendezvousStoreInfo(self.master_addr, self._store.port)
        return RendezvousInfo(info.store, info.rank, info.world_size, store_info)


class Bulletin:
    """Failures that the machines' agents tell each other, through a store; a thread does the talking, since a
    call to a machine that hangs would block.
    """

    def __init__(self, store: Store) -> None:
        self.failures: list[Failure] = []
        self.lost_since: float | None = None  # monotonic time at which the store went out of reach
        self._outgoing: list[Failure] = []
        self._store = store
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._talk, name="bulletin", daemon=True)
        self._thread.start()

    def post(self, failures: Sequence[Failure]) -> None:
        """Replace what this launcher tells the others: the failures of its own workers."""
        self._outgoing = list(failures)

    def close(self) -> None:
        """Ends the talk: a thread inside a call to the store when the interpreter ends would abort it."""
        self._closed.set()
        self._thread.join(LOST_STORE_SECONDS)

    def _talk(self) -> None:
        try:
            while not self._closed.wait(POLL_SECONDS):
                while self._outgoing:
                    number = self._store.add("failures", 1)
                    self._store.set(f"failure/{number}", json.dumps(asdict(self._outgoing.pop(0))))
                while self._store.check([f"failure/{len(self.failures) + 1}"]):
                    text = self._store.get(f"failure/{len(self.failures) + 1}")
                    self.failures.append(Failure(**json.loads(text)))
        except (DistError, RuntimeError):
            self.lost_since = time.monotonic()


class Agent(LocalElasticAgent):
    """Runs the workers of one machine; after `run`, `interrupts`, `failures` and `codes` say how it went."""

    def __init__(self, spec: WorkerSpec, logs: DefaultLogsSpecs) -> None:
        super().__init__(spec, logs, exit_barrier_timeout=LOST_STORE_SECONDS)
        self.forwarded: set[int] = set()
        self.interrupts = 0
        self.failures: list[Failure] = []
        self.codes: dict[int, int | None] = {}
        self._bulletin: Bulletin | None = None
        self._first_end: float | None = None

    # ---- signals

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal on to the workers; a second interrupt kills them."""
        self.interrupts += number == signal.SIGINT
        if self.interrupts > 1:
            self.signal_workers(signal.SIGKILL)
            return
        if not self.forwarded:
            again = "; again: end at once" if number == signal.SIGINT else ""
            say(f"{signal.Signals(number).name}: the workers finish the step, save and end{again}")
        # A worker that gets SIGINT while it still imports would print a traceback.
        forward = signal.SIGTERM if number == signal.SIGINT else number
        self.forwarded.add(forward)
        self.signal_workers(forward)

    def signal_workers(self, number: int) -> None:
        """To SIGKILL a worker also ends the processes that it started; other signals are for itself only."""
        for handler in getattr(self._pcontext, "subprocess_handlers", {}).values():
            try:
                if number == signal.SIGKILL:
                    os.killpg(handler.proc.pid, number)
                elif handler.proc.poll() is None:
                    handler.proc.send_signal(number)
            except (ProcessLookupError, PermissionError):  # ended, with all that it started
                pass

    # ---- what torch's agent calls

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        for number in STOP_SIGNALS:
            signal.signal(number, self.on_signal)
        if worker_group.group_world_size > 1:
            self._bulletin = Bulletin(worker_group.store)
        pids = super()._start_workers(worker_group)
        for number in self.forwarded:  # came while they were being started
            self.signal_workers(number)
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self.codes = {
            worker.global_rank: self._pcontext.subprocess_handlers[worker.local_rank].proc.poll()
            for worker in worker_group.workers
        }
        ended = [code for code in self.codes.values() if code is not None]
        died = [code for code in ended if not self.is_orderly(code)]
        reason = "" if died else self.reason_to_end(len(ended))
        if died or reason:
            self.end_all(worker_group, reason)
        elif len(ended) < len(self.codes):
            return RunResult(state=WorkerState.HEALTHY)
        elif EXIT_STOPPED in ended and worker_group.group_world_size > 1:
            self._exit_barrier()  # node 0 holds the store that the others still look at
        return super()._monitor_workers(worker_group)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGKILL, timeout: int = 5) -> None:
        self.signal_workers(signal.SIGKILL)
        if self._bulletin is not None:
            self._bulletin.close()
        super()._shutdown(signal.SIGKILL, timeout=5)

    # ---- the rules

    def is_orderly(self, code: int) -> bool:
        """Ended well, or on request, be it that the signal came before the worker could handle it."""
        return code in (EXIT_OK, EXIT_STOPPED) or -code in self.forwarded

    def reason_to_end(self, ended: int) -> str:
        """Why workers that still run must be ended although none died here; "" if they need not."""
        now = time.monotonic()
        if ended == len(self.codes) or self.interrupts > 1:
            return ""
        if self._bulletin is not None and self._bulletin.failures:
            return "a rank failed on another machine"
        lost = self._bulletin.lost_since if self._bulletin is not None else None
        if lost is not None and now - lost > LOST_STORE_SECONDS:
            return "the launcher of node 0 can't be reached any more"
        if ended == 0:
            return ""
        self._first_end = self._first_end or now
        if now - self._first_end > STRAGGLER_SECONDS:
            return f"it was still running {STRAGGLER_SECONDS:.0f} s after another rank had ended"
        return ""

    def end_all(self, worker_group: WorkerGroup, reason: str) -> None:
        """Waits a moment for the ranks to end by themselves, notes how each one did, and kills the rest."""
        handlers = self._pcontext.subprocess_handlers
        deadline = time.monotonic() + SETTLE_SECONDS
        ends: dict[int, float] = {}
        while time.monotonic() < deadline and len(ends) < len(handlers):
            for local_rank, handler in handlers.items():
                if handler.proc.poll() is not None:
                    ends.setdefault(local_rank, time.time())
            time.sleep(0.02)
        self.failures = self.collect(worker_group, ends)
        if self._bulletin is not None:
            self._bulletin.post(self.failures)
            time.sleep(SETTLE_SECONDS)
            self.failures += [f for f in self._bulletin.failures if f.rank not in self.codes]
        if all(failure.lost_peer for failure in self.failures):  # nobody died: the others wait for one that hangs
            self.failures += self.hanging(worker_group, ends, reason or SILENT)
        self.signal_workers(signal.SIGKILL)
        for handler in handlers.values():
            handler.proc.wait()

    def hanging(self, worker_group: WorkerGroup, ends: dict[int, float], reason: str) -> list[Failure]:
        """One Failure for each local rank that did not end by itself."""
        return [
            Failure(
                rank=worker.global_rank,
                host=socket.gethostname(),
                pid=int(worker.id),
                exitcode=-signal.SIGKILL,
                time=time.time(),
                message=reason,
                progress=self.progress(worker.local_rank),
            )
            for worker in worker_group.workers
            if worker.local_rank not in ends
        ]

    def progress(self, local_rank: int) -> str:
        """How far a worker said that it was."""
        return read_text(Path(self._pcontext.error_files[local_rank]).with_name("progress")).strip()

    def collect(self, worker_group: WorkerGroup, ends: dict[int, float]) -> list[Failure]:
        """One Failure for each local rank that ended by itself in bad order (ends: local rank to time)."""
        failures = []
        for worker in worker_group.workers:
            code = self._pcontext.subprocess_handlers[worker.local_rank].proc.returncode
            if worker.local_rank not in ends or self.is_orderly(code):
                continue
            error = read_error(Path(self._pcontext.error_files[worker.local_rank]))
            failures.append(
                Failure(
                    rank=worker.global_rank,
                    host=socket.gethostname(),
                    pid=int(worker.id),
                    exitcode=code,
                    time=error.pop("time", ends[worker.local_rank]),
                    progress=self.progress(worker.local_rank),
                    **error,
                )
            )
        return failures


def read_text(path: Path) -> str:
    """The text of a file, "" where there is none."""
    return path.read_text() if path.exists() else ""


def read_error(path: Path) -> dict[str, Any]:
    """Fields of Failure from a worker's error file; empty if it left none, or died while writing it."""
    try:
        message = json.loads(read_text(path) or "{}")["message"]
        extra = message["extraInfo"]
        return {
            "message": message["message"],
            "trace": extra["py_callstack"],
            "time": float(extra["time"]),
            "lost_peer": bool(extra["lost_peer"]),
        }
    except (ValueError, KeyError, TypeError):
        return {}


def say(text: str) -> None:
    """A message to the user, on stderr."""
    print(f"megnorm: {text}", file=sys.stderr, flush=True)


def run_agent(
    command: Sequence[str], nproc: int, nnodes: int, node_rank: int, host: str, port: int, timeout: float
) -> int:
    """Runs `command` in nproc workers under an agent and returns the run's exit code (megnorm.launcher)."""
    # Torch's agent logs what is said better below.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    # While this machine waits for the others, in C++, Python could not handle Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with tempfile.TemporaryDirectory(prefix="megnorm-") as folder:
        rendezvous = FreePortRendezvous(host, port, node_rank, nnodes, "megnorm", int(timeout))
        spec = WorkerSpec(
            role="worker",
            local_world_size=nproc,
            entrypoint=command[0],
            args=tuple(command[1:]),
            rdzv_handler=rendezvous,
            max_restarts=0,
            monitor_interval=POLL_SECONDS,
        )
        agent = Agent(spec, DefaultLogsSpecs(log_dir=folder))
        try:
            agent.run()
        except DistError as error:
            what = "listen" if node_rank == 0 and nnodes == 1 else "meet the other machines"
            say(f"node {node_rank} of {nnodes} could not {what} at {host}:{port} ({error})")
            return EXIT_FAILURE
        return conclude(agent)


def conclude(agent: Agent) -> int:
    """Says how the run ended, if not well, and returns its exit code."""
    if agent.interrupts > 1:
        say("interrupted twice: killed without saving")
        return EXIT_INTERRUPTED
    if not agent.failures:
        if set(agent.codes.values()) == {EXIT_OK}:
            return EXIT_OK
        if EXIT_STOPPED not in agent.codes.values():
            say("stopped before training had begun; nothing was saved")
        return EXIT_STOPPED
    first = first_failure(agent.failures)
    if first.message and first.exitcode in (EXIT_USER_ERROR, EXIT_NO_SPACE):
        say(first.message)
        return first.exitcode
    if first.trace:
        print(first.trace, file=sys.stderr, flush=True)
    say(first.describe())
    for other in agent.failures:
        if other is not first and not other.lost_peer and other.message != first.message:
            say(f"also: {other.describe()}")
    say("all other processes were ended; the same command continues from the last checkpoint, if there is one")
    return EXIT_FAILURE
