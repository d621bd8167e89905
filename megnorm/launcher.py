"""Starts the worker processes of a run on this machine, and is the entry point of each worker.

`launch` runs one agent of torch's elastic package (`megnorm.agent`) per machine; `worker_main` wraps what a
worker does, so that an error, a dead process or a signal ends the whole run with one clear message.

Exit codes, of a worker and of the whole run:

    0     done
    1     failure: a rank raised, died, or lost its peers; the message names the first one
    2     user's error (configuration, files), one message, no traceback
    74    a checkpoint could not be saved for lack of space and the run had to end (the last good one stays)
    75    stopped by a signal after saving a checkpoint: the same command again continues the run
    130   interrupted a second time: killed at once, without saving

Signals: SIGTERM, SIGINT and SIGUSR1 sent to `launch` are handed on to every worker; workers finish the step,
save and end with 75. A second SIGINT kills everything at once.
"""

from __future__ import annotations

import argparse
import errno
import faulthandler
import json
import os
import platform
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from megnorm.exits import EXIT_FAILURE, EXIT_NO_SPACE, EXIT_OK, EXIT_USER_ERROR

# glibc's malloc returns every large buffer to the system and takes it again, page fault by page fault, in
# each step; kept, a step costs 9 % (fp32) to 13 % (bf16) less CPU.
MALLOC_SETTINGS = {
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
    "MALLOC_TOP_PAD_": str(256 << 20),
}
# Set in every worker that `launch` started: its agent prints the errors, so the worker does not.
AGENT_MARK = "MEGNORM_AGENT"
WORKER_COMMAND = (sys.executable, "-m", "megnorm", "train")
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")


class LaunchError(ValueError):
    """The processes can't be started as asked: which value, which rule, what to do."""


def is_worker(environ: Mapping[str, str] | None = None) -> bool:
    """True in a process that an agent (ours or torchrun) started: it has a rank and a world size."""
    environ = os.environ if environ is None else environ
    return "RANK" in environ and "WORLD_SIZE" in environ


def usable_cores() -> int:
    """Cores that this process may use: its affinity, and a container's CPU quota where there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # no such file, or "max": no quota
        pass
    return cores


def worker_environment(
    nproc: int,
    environ: Mapping[str, str],
    *,
    cores: int,
    gpu: bool,
    compile: bool = False,
    local: bool = True,
) -> dict[str, str]:
    """The settings that workers need beside `environ`; what the user has set there is left alone.

    nproc: workers on this machine; cores: usable cores of it; gpu: whether they run on GPUs; compile: whether
    anything in the run asks for torch.compile; local: whether all ranks of the run are on this machine.
    """
    threads = environ.get("OMP_NUM_THREADS", str(max(1, cores // nproc)))
    settings = {"OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1", **MALLOC_SETTINGS}
    if nproc > 1 and threads.isdecimal() and nproc * int(threads) >= cores:
        # Idle OpenMP threads that spin take the cores from the other ranks and from gloo.
        settings["OMP_WAIT_POLICY"] = "PASSIVE"
    if not gpu:
        settings["DS_ACCELERATOR"] = "cpu"
        if not compile:
            # DeepSpeed imports torch's compiler for an optimizer that is not used: 0.3 to 0.9 s a process.
            settings["TORCHDYNAMO_DISABLE"] = "1"
    if local:
        # Without it gloo looks the host's own name up, which fails on machines whose name does not resolve.
        settings["GLOO_SOCKET_IFNAME"] = "lo0" if platform.system() == "Darwin" else "lo"
    return {name: value for name, value in settings.items() if name not in environ}


def cuda_is_available() -> bool:
    """Whether torch sees a GPU."""
    import torch

    return torch.cuda.is_available()


def launch(
    argv: Sequence[str],
    nproc: int,
    *,
    nnodes: int = 1,
    node_rank: int = 0,
    rdzv_endpoint: str | None = None,
    rdzv_timeout: float = 600.0,
    environ: Mapping[str, str] | None = None,
    compile: bool = False,
    command: Sequence[str] = WORKER_COMMAND,
) -> int:
    """Runs `command + argv` in nproc worker processes of this machine and returns the run's exit code.

    With nnodes > 1 the same call runs on every machine, with its node_rank (0 .. nnodes - 1) and the same
    rdzv_endpoint "HOST:PORT", an address of node 0 that all can reach; rdzv_timeout is how many seconds the
    machines wait for each other. environ: the environment to start from (default: this process's). Must be
    called from the main thread, since it takes over the handling of signals. Raises LaunchError.
    """
    assert threading.current_thread() is threading.main_thread()
    host, port = check_nodes(nproc, nnodes, node_rank, rdzv_endpoint)
    base = dict(os.environ if environ is None else environ)
    settings = worker_environment(
        nproc,
        base,
        cores=usable_cores(),
        gpu=cuda_is_available(),
        compile=compile,
        local=host in LOOPBACK_HOSTS,
    )
    from megnorm.agent import run_agent

    # Torch's agent must not take the signals over: its handlers end the workers.
    own = {AGENT_MARK: "1", "TORCHELASTIC_SIGNALS_TO_HANDLE": ""}
    with process_environment({**base, **settings, **own}):
        return run_agent([*command, *argv], nproc, nnodes, node_rank, host, port, rdzv_timeout)


def check_nodes(nproc: int, nnodes: int, node_rank: int, rdzv_endpoint: str | None) -> tuple[str, int]:
    """Address and port where node 0 listens (port 0: any free one). Raises LaunchError."""
    if nproc < 1:
        raise LaunchError(f"nproc is {nproc}; at least one process per machine is needed")
    if nnodes < 1 or not 0 <= node_rank < nnodes:
        raise LaunchError(f"node_rank is {node_rank} with nnodes {nnodes}; it must be in 0 .. nnodes - 1")
    if rdzv_endpoint is None:
        if nnodes > 1:
            raise LaunchError(f"nnodes is {nnodes}: give rdzv_endpoint HOST:PORT, an address of node 0")
        return "127.0.0.1", 0
    host, _, port = rdzv_endpoint.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise LaunchError(f"rdzv_endpoint is {rdzv_endpoint!r}; it must be HOST:PORT, such as node0:29500")
    return host.strip("[]"), int(port)


@contextmanager
def process_environment(environ: Mapping[str, str]) -> Iterator[None]:
    """The process's environment is `environ` inside; workers inherit it from there."""
    before = dict(os.environ)
    try:
        os.environ.clear()
        os.environ.update(environ)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


# ---- the worker's side


class Progress:
    """How far this worker is, kept where its agent can read it even after the process was killed."""

    WIDTH = 80

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else open(path, "wb", buffering=0)

    def set(self, text: str) -> None:
        """text: a few words such as "step 120", put into the message if this rank dies.

        Written over the last one in a single call: a kill never finds the file empty.
        """
        if self._file is not None:
            os.pwrite(self._file.fileno(), text[: self.WIDTH].ljust(self.WIDTH).encode(), 0)


def worker_main(main: Callable[[Progress], int | None]) -> NoReturn:
    """Runs `main(progress)` as this worker's whole job and ends the process with its exit code (None counts as 0).

    An exception is written where the agent finds it (or printed, under torchrun). One line without traceback
    and code 2 for a ValueError subclass of megnorm; code 74 for a full disk; the attribute `exit_code` of an
    exception overrides the code. Anything else gives 1 and the traceback.

    The process ends at once, without the interpreter's clean-up: destructors of a broken process group may
    hang, and threads that a whole one has left behind may abort a run that ended well.
    """
    faulthandler.enable()
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if is_worker():
        end_with_parent()
    try:
        code = main(Progress(Path(error_file).with_name("progress") if error_file else None)) or EXIT_OK
    except Exception as error:
        code, is_expected = exit_code_of(error)
        text = str(error) if is_expected else f"{type(error).__name__}: {error}"
        trace = "" if is_expected else traceback.format_exc()
        if error_file and AGENT_MARK in os.environ:
            write_error(Path(error_file), text, trace, is_lost_peer(error))
        else:
            rank = f"rank {os.environ['RANK']}: " if is_worker() else ""
            print(f"{trace}megnorm: {rank}{text}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def exit_code_of(error: Exception) -> tuple[int, bool]:
    """Exit code for an exception, and whether its message says all that the user needs."""
    if hasattr(error, "exit_code"):
        return error.exit_code, True
    if isinstance(error, ValueError) and type(error).__module__.startswith("megnorm."):
        return EXIT_USER_ERROR, True
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return EXIT_NO_SPACE, True
    return EXIT_FAILURE, False


def is_lost_peer(error: Exception) -> bool:
    """True for the errors that a healthy rank gets when another one has died."""
    signs = (
        "gloo",
        "Connection closed by peer",
        "Connection reset",
        "Broken pipe",
        "NCCL",
        "recvValue failed",
    )
    return type(error).__name__ in ("DistNetworkError", "DistBackendError", "DistStoreError") or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
    )


def write_error(path: Path, text: str, trace: str, lost_peer: bool) -> None:
    """Torch's format of an error file, with two fields more that tell the first error from its echoes."""
    extra = {
        "py_callstack": trace,
        "timestamp": str(int(time.time())),
        "time": time.time(),
        "lost_peer": lost_peer,
    }
    path.write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))


def end_with_parent() -> None:
    """Ends this process when its agent is gone (killed with SIGKILL, say): nobody would end it otherwise."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def main() -> None:
    """`python -m megnorm.launcher --print-env NPROC`: the settings as shell lines, for launch/torchrun.sh."""
    parser = argparse.ArgumentParser(prog="python -m megnorm.launcher", description=main.__doc__)
    parser.add_argument("--print-env", type=int, metavar="NPROC", required=True, help="processes per machine")
    parser.add_argument("--nnodes", type=int, default=1, help="machines (default: 1)")
    args = parser.parse_args()
    settings = worker_environment(
        args.print_env,
        os.environ,
        cores=usable_cores(),
        gpu=cuda_is_available(),
        compile=True,  # not known here, so the compiler stays on
        local=args.nnodes == 1,
    )
    for name, value in settings.items():
        print(f"export {name}={shlex.quote(value)}")


if __name__ == "__main__":
    main()
