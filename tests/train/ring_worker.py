"""A worker for the launcher's tests: sums over gloo until told to end, with one planted way to end badly.

    ring_worker.py FOLDER STEPS [rank:how]    how: exit3, kill, raise, user, hang, full in step 3;
                                              slow: to end after a stop

FOLDER receives one file per rank, "pid"; "stopped" after a signal was handled; "sum" at the end.
"""

import errno
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megnorm.exits import EXIT_STOPPED
from megnorm.launcher import LaunchError, Progress, worker_main


def end_badly(how: str) -> None:
    if how == "exit3":
        os._exit(3)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raise":
        raise RuntimeError("the loss is not a number")
    if how == "user":
        raise LaunchError("token 99 is beyond the vocabulary of 50")
    if how == "full":
        raise OSError(errno.ENOSPC, "No space left on device")
    if how == "hang":
        time.sleep(1000)


def run(progress: Progress) -> int:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    bad_rank, _, how = (sys.argv[3] if len(sys.argv) > 3 else ":").partition(":")
    stop = torch.zeros(1)
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: signals.append(number))
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    (folder / f"pid{rank}").write_text(f"{os.getpid()} {os.environ['OMP_NUM_THREADS']}")
    total = torch.zeros(1)
    for step in range(1, steps + 1):
        if step == 3 and str(rank) == bad_rank:
            end_badly(how)
        total = torch.full((1,), float(rank + 1))
        dist.all_reduce(total)
        stop.fill_(float(len(signals)))
        dist.all_reduce(stop)
        progress.set(f"step {step}")
        if stop.item() > 0:
            if how == "slow" and str(rank) == bad_rank:
                time.sleep(2)  # ends well after the others
            (folder / f"stopped{rank}").write_text(str(step))
            dist.destroy_process_group()  # without it gloo's threads may abort the process at its end
            return EXIT_STOPPED
        time.sleep(0.02)
    assert total.item() == world * (world + 1) / 2
    (folder / f"sum{rank}").write_text(str(int(total.item())))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    worker_main(run)
