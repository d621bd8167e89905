"""The launcher with real processes: ends, deaths, signals; and its settings."""

import json
import signal
import sys
import time
from pathlib import Path

import pytest
from launching import is_running, wait_for, worker_pids

from megnorm.launcher import LaunchError, check_nodes, is_worker, worker_environment

WORKER = [sys.executable, str(Path(__file__).with_name("ring_worker.py"))]


def spec(folder: Path, steps: int, *bad: str, nproc: int = 2, **more: object) -> str:
    return json.dumps({"argv": [str(folder), str(steps), *bad], "nproc": nproc, "command": WORKER, **more})


def test_ranks_meet_and_end_well(launched, tmp_path: Path) -> None:
    code, errors = launched(spec(tmp_path, 3)).wait()
    assert (code, errors) == (0, "")
    assert [(tmp_path / f"sum{rank}").read_text() for rank in range(2)] == ["3", "3"]


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("exit3", 1, "ended with exit code 3 after step 2"),
        ("kill", 1, "was killed by SIGKILL after step 2"),
        ("raise", 1, "failed after step 2: RuntimeError: the loss is not a number"),
        ("user", 2, "megnorm: token 99 is beyond the vocabulary of 50"),
        ("full", 74, "No space left on device"),
    ],
)
def test_a_dead_rank_ends_all_and_is_named(launched, tmp_path: Path, how: str, code: int, said: str) -> None:
    run = launched(spec(tmp_path, 1000, f"1:{how}"))
    wait_for(lambda: len(worker_pids(tmp_path)) == 2)
    begin = time.monotonic()
    got, errors = run.wait()
    assert time.monotonic() - begin < 15
    assert got == code
    assert said in errors
    assert not any(is_running(pid) for pid in worker_pids(tmp_path))
    if code == 1:
        assert "rank 1 (host " in errors and f"pid {worker_pids(tmp_path)[1]})" in errors
    else:
        assert errors.count("\n") == 1, "a user's error is one line"
    assert ("Traceback" in errors) == (how == "raise")
    assert "rank 0" not in errors, "the rank that only lost its peer is not blamed"
    assert "ChildFailedError" not in errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_lets_all_workers_save(launched, tmp_path: Path, number: signal.Signals) -> None:
    run = launched(spec(tmp_path, 1000))
    wait_for(lambda: len(worker_pids(tmp_path)) == 2)
    time.sleep(0.3)
    run.process.send_signal(number)
    code, errors = run.wait()
    assert code == 75
    steps = [(tmp_path / f"stopped{rank}").read_text() for rank in range(2)]
    assert steps[0] == steps[1], "both handled the signal, in the same step"
    assert number.name in errors and errors.count("\n") == 1


def test_a_slow_rank_may_finish_its_save(launched, tmp_path: Path) -> None:
    run = launched(spec(tmp_path, 1000, "1:slow"))
    wait_for(lambda: len(worker_pids(tmp_path)) == 2)
    time.sleep(0.3)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait()[0] == 75
    assert (tmp_path / "stopped1").exists()


def test_a_second_interrupt_kills_at_once(launched, tmp_path: Path) -> None:
    run = launched(spec(tmp_path, 1000, "1:hang"))
    wait_for(lambda: len(worker_pids(tmp_path)) == 2)
    time.sleep(0.5)
    run.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGINT)
    code, errors = run.wait(10)
    assert code == 130 and "killed without saving" in errors
    assert not any(is_running(pid) for pid in worker_pids(tmp_path))


def test_a_signal_before_the_workers_are_ready(launched, tmp_path: Path) -> None:
    slow = [
        sys.executable,
        "-c",
        f"open({str(tmp_path / 'pid0')!r}, 'w').write('1'); import time; time.sleep(60)",
    ]
    run = launched(json.dumps({"argv": [], "nproc": 2, "command": slow}))
    wait_for((tmp_path / "pid0").exists)
    run.process.send_signal(signal.SIGTERM)
    code, errors = run.wait(10)
    assert code == 75 and "nothing was saved" in errors


def test_workers_end_with_a_killed_launcher(launched, tmp_path: Path) -> None:
    run = launched(spec(tmp_path, 100000))
    wait_for(lambda: len(worker_pids(tmp_path)) == 2)
    run.process.kill()
    wait_for(lambda: not any(is_running(pid) for pid in worker_pids(tmp_path)), 5)


def test_settings_fit_the_machine() -> None:
    two = worker_environment(2, {}, cores=16, gpu=False)
    assert two["OMP_NUM_THREADS"] == "8" and two["OMP_WAIT_POLICY"] == "PASSIVE"
    assert two["DS_ACCELERATOR"] == "cpu" and two["TORCHDYNAMO_DISABLE"] == "1"
    assert two["MALLOC_MMAP_THRESHOLD_"] == str(2**32)
    one = worker_environment(1, {}, cores=16, gpu=False)
    assert one["OMP_NUM_THREADS"] == "16" and "OMP_WAIT_POLICY" not in one
    assert worker_environment(8, {}, cores=2, gpu=False)["OMP_NUM_THREADS"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in worker_environment(2, {}, cores=2, gpu=False, compile=True)
    on_gpu = worker_environment(2, {}, cores=2, gpu=True)
    assert "DS_ACCELERATOR" not in on_gpu and "TORCHDYNAMO_DISABLE" not in on_gpu
    assert "GLOO_SOCKET_IFNAME" not in worker_environment(2, {}, cores=2, gpu=False, local=False)


def test_the_users_own_settings_stay() -> None:
    own = {"OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "ACTIVE", "MALLOC_TOP_PAD_": "0", "DS_ACCELERATOR": "x"}
    assert not own.keys() & worker_environment(4, own, cores=8, gpu=False).keys()


def test_worker_is_known_by_rank_and_world() -> None:
    assert is_worker({"RANK": "0", "WORLD_SIZE": "1"})
    assert not is_worker({"RANK": "0"}) and not is_worker({})


@pytest.mark.parametrize(
    ("nproc", "nnodes", "node_rank", "endpoint", "said"),
    [
        (0, 1, 0, None, "nproc is 0"),
        (1, 2, 2, "a:1", "node_rank is 2"),
        (1, 2, 0, None, "give rdzv_endpoint"),
        (1, 2, 0, "host", "must be HOST:PORT"),
        (1, 2, 0, "host:99999", "must be HOST:PORT"),
    ],
)
def test_a_wrong_request_is_refused(
    nproc: int, nnodes: int, node_rank: int, endpoint: str | None, said: str
) -> None:
    with pytest.raises(LaunchError, match=said):
        check_nodes(nproc, nnodes, node_rank, endpoint)
