"""Run a function on several ranks of one machine: processes forked from a server that has torch loaded,
gloo, rendezvous by a file (no ports)."""

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import wait
from typing import Any

from megnorm.launcher import process_environment

# Every optimizer of torch imports torch._dynamo, a second of CPU in each rank.
SETTINGS = {"DS_ACCELERATOR": "cpu", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
PRELOAD = ["torch", "torch._dynamo", "deepspeed", "deepspeed.runtime.pipe.engine", "megnorm.build"]


class RankFailed(AssertionError):
    """A rank raised, died or did not end in time; the message holds its traceback."""


def run_ranks(function: Callable, world: int, *args: Any, timeout: float = 120.0,
              backend: str = "gloo") -> list[Any]:
    """Call ``function(*args)`` on ``world`` ranks with the default process group initialised.

    ``function`` must be importable (module level). Returns the results in rank order; raises RankFailed
    with the first failing rank's traceback, after ending all of them.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    # The ranks inherit the server's environment, which is set when it starts; ours stays as it is.
    with process_environment({**SETTINGS, **os.environ}):
        forkserver.ensure_running()
    with tempfile.TemporaryDirectory() as folder:
        pipes, ranks = [], []
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank, args=(function, rank, world, f"{folder}/store", theirs, args, backend), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            ranks.append(process)
        try:
            return _collect(pipes, ranks, time.monotonic() + timeout)
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _collect(pipes: list, ranks: list, deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(ranks):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = [rank for rank in range(len(ranks)) if rank not in results]
            raise RankFailed(f"ranks {missing} did not end in time")
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                ok, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                ranks[rank].join()
                raise RankFailed(f"rank {rank} died with exit code {ranks[rank].exitcode}") from None
            if not ok:
                raise RankFailed(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(ranks))]


def _rank(function: Callable, rank: int, world: int, store: str, pipe: Any, args: tuple, backend: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
        result = function(*args)
        dist.barrier()
        dist.destroy_process_group()
        pipe.send_bytes(pickle.dumps((True, result)))  # by value: shared memory would die with the rank
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
        raise SystemExit(1) from None
