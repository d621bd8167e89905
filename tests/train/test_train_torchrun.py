"""Under torchrun instead of the own launcher, which clusters' scripts use."""

import re
from pathlib import Path

from small_run import STEPS, Command, differing, raw_config, rows, run, tensors, write_config

TORCHRUN = (
    "-m",
    "torch.distributed.run",
    "--nproc_per_node",
    "2",
    "--rdzv_backend",
    "c10d",
    "--rdzv_endpoint",
    "localhost:0",
    "-m",
    "megnorm",
)


def torchrun(*arguments: object) -> Command:
    return run(*arguments, nproc=None, start=TORCHRUN, GLOO_SOCKET_IFNAME="lo", DS_ACCELERATOR="cpu")


def test_it_is_the_same_run(data: Path, undisturbed: Path, tmp_path: Path) -> None:
    command = torchrun(write_config(tmp_path / "config.yaml", raw_config(data, tmp_path / "run")))
    assert command.code == 0, command.errors
    assert "done: 20 steps" in command.out
    assert not differing(tensors(tmp_path / "run", STEPS), tensors(undisturbed, STEPS))
    assert rows(tmp_path / "run") == rows(undisturbed)


def test_a_mistake_is_named_with_the_rank_that_met_it(data: Path, tmp_path: Path) -> None:
    # Every rank checks the config by itself; torchrun ends the others as soon as the first one has failed.
    config = write_config(tmp_path / "config.yaml", raw_config(data, tmp_path / "run"))
    command = torchrun(config, "train.global_batch=7")
    assert command.code != 0
    message = r"rank [01]: train\.global_batch=7 is not divisible by micro_batch=1 x dp=2 = 2"
    assert re.search(message, command.errors), command.errors
    assert "exitcode  : 2" in command.errors and "ValueError" not in command.errors
    assert not (tmp_path / "run").exists()
