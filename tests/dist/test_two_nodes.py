"""Two agents on the loopback interface, as two machines."""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
from launching import is_running, wait_for, worker_pids

WORKER = [sys.executable, str(Path(__file__).parents[1] / "train" / "ring_worker.py")]


def specs(folder: Path, steps: int, *bad: str, nproc: int) -> list[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    common = {"argv": [str(folder), str(steps), *bad], "nproc": nproc, "command": WORKER, "nnodes": 2}
    return [json.dumps({**common, "node_rank": node, "rdzv_endpoint": endpoint}) for node in range(2)]


@pytest.mark.parametrize("nproc", [1, 2])
def test_all_ranks_of_two_nodes_meet(launched, tmp_path: Path, nproc: int) -> None:
    nodes = [launched(one) for one in specs(tmp_path, 3, nproc=nproc)]
    assert [node.wait() for node in nodes] == [(0, ""), (0, "")]
    world = 2 * nproc
    assert [(tmp_path / f"sum{rank}").read_text() for rank in range(world)] == [
        str(world * (world + 1) // 2)
    ] * world


@pytest.mark.parametrize("how", ["raise", "kill"])
def test_a_death_on_one_node_ends_both(launched, tmp_path: Path, how: str) -> None:
    nodes = [launched(one) for one in specs(tmp_path, 1000, f"1:{how}", nproc=1)]
    wait_for(lambda: len(worker_pids(tmp_path)) == 2)
    begin = time.monotonic()
    results = [node.wait() for node in nodes]
    assert time.monotonic() - begin < 20
    assert [code for code, _ in results] == [1, 1]
    for _, errors in results:
        assert "rank 1 (host " in errors and "rank 0" not in errors, "both name the same rank"
    assert not any(is_running(pid) for pid in worker_pids(tmp_path))


def test_a_death_is_told_to_a_node_that_cannot_see_it(launched, tmp_path: Path) -> None:
    """Rank 0 never reaches the collective in which it would notice."""
    nodes = [launched(one) for one in specs(tmp_path, 1000, "0:hang", nproc=1)]
    wait_for(lambda: len(worker_pids(tmp_path)) == 2)
    time.sleep(0.5)
    os.kill(worker_pids(tmp_path)[1], signal.SIGKILL)
    results = [node.wait(25) for node in nodes]
    assert [code for code, _ in results] == [1, 1]
    assert all("rank 1 (host " in errors and "SIGKILL" in errors for _, errors in results)


def test_a_signal_to_one_node_stops_both_in_the_same_step(launched, tmp_path: Path) -> None:
    nodes = [launched(one) for one in specs(tmp_path, 1000, nproc=1)]
    wait_for(lambda: len(worker_pids(tmp_path)) == 2)
    time.sleep(0.3)
    nodes[1].process.send_signal(signal.SIGTERM)
    assert [node.wait()[0] for node in nodes] == [75, 75]
    assert (tmp_path / "stopped0").read_text() == (tmp_path / "stopped1").read_text()


def test_a_dead_launcher_of_node_0_ends_the_others(launched, tmp_path: Path) -> None:
    nodes = [launched(one) for one in specs(tmp_path, 100000, "1:hang", nproc=1)]
    wait_for(lambda: len(worker_pids(tmp_path)) == 2)
    time.sleep(0.5)
    nodes[0].process.kill()
    code, errors = nodes[1].wait(30)
    assert code == 1 and "launcher of node 0" in errors
    assert not any(is_running(pid) for pid in worker_pids(tmp_path))
