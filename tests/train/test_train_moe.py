"""The command trains a model with experts on two ranks that share them; killed and continued it is the undisturbed
run bit by bit, balancing biases too; what can't be is refused before any worker starts."""

from pathlib import Path

from small_run import SAVED, STEPS, Command, differing, kill, raw_config, rows, run, tensors, write_config
from test_train_resume import train_in_process

from megnorm.testing.ranks import run_ranks

EXPERTS = {"experts": 4, "top_k": 2, "ffn_hidden": 16, "balance": "bias", "bias_rate": 0.01}


def config(data: Path, folder: Path, name: str, **changes) -> Path:
    return write_config(folder / f"{name}.yaml", raw_config(
        data, folder / name, observe__tensorboard=False, train__check_replicas_every=5, model__moe=EXPERTS,
        **{"parallel__ep": 2, **changes}))


def test_killed_with_minus_nine_and_continued(data: Path, tmp_path: Path) -> None:
    path = config(data, tmp_path, "run")
    command = Command(path)
    try:
        command.wait_for_step(tmp_path / "run", SAVED + 1)
        kill([process.pid for process in command.everyone()])
    finally:
        command.end()
    done = rows(tmp_path / "run")
    assert SAVED < done[-1]["step"] < STEPS, "it was killed in the middle"
    again = run(path)
    assert again.code == 0, again.errors
    assert f"resumed from {tmp_path}/run/checkpoints/step-00000010" in again.out and "EP=2" in again.out
    assert run_ranks(train_in_process, 2, str(config(data, tmp_path, "whole")), None) == [0, 0]
    kept = tensors(tmp_path / "run", STEPS)
    assert not differing(kept, tensors(tmp_path / "whole", STEPS))
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")
    biases = {name: value for name, value in kept.items() if name.endswith("router.balance/state")}
    assert len(biases) == 2 and all(abs(value).max() > 0 for value in biases.values())
    losses = [row["loss"] for row in rows(tmp_path / "run") if "split" not in row]
    assert len(losses) == STEPS and losses[-1] < losses[0] - 0.5


def test_experts_that_no_rank_can_share_out_have_one_message(data: Path, tmp_path: Path) -> None:
    command = run(config(data, tmp_path, "run", parallel__ep=3))
    assert command.code == 2 and command.errors.count("\n") == 1, command.errors
    assert "Traceback" not in command.errors and not (tmp_path / "run").exists()
    assert "parallel.ep=3" in command.errors and "model.moe.experts=4; ep could be one of [1, 2]" in command.errors
