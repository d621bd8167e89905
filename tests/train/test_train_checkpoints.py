"""From which checkpoint a run goes on, and what of its configuration may change."""

import shutil
from pathlib import Path

import pytest
from small_run import SAVED, STEPS, differing, raw_config, rows, run, tensors, write_config

from megnorm.checkpoint.storage import candidates


@pytest.fixture
def copied(data: Path, undisturbed: Path, tmp_path: Path) -> Path:
    """Configuration of a run that has ended after 20 steps, with checkpoints of steps 10 and 20."""
    shutil.copytree(undisturbed, tmp_path / "run")
    return write_config(tmp_path / "config.yaml", raw_config(data, tmp_path / "run"))


def test_a_run_that_has_ended_ends_again(copied: Path) -> None:
    run_dir = copied.parent / "run"
    before = rows(run_dir)
    again = run(copied)
    assert again.code == 0, again.errors
    assert "resumed from" in again.out and "done: 20 steps" in again.out
    assert rows(run_dir) == before
    assert [path.name for path in candidates(run_dir)] == ["step-00000020", "step-00000010"]


def test_none_is_refused_beside_checkpoints(copied: Path) -> None:
    refused = run(copied, "--resume", "none")
    assert refused.code == 2 and refused.out == ""
    assert "resume=none would start at step 0 beside the checkpoints" in refused.errors
    assert len(candidates(copied.parent / "run")) == 2


def test_a_damaged_checkpoint_is_passed_over_and_a_change_is_shown(copied: Path, undisturbed: Path) -> None:
    """The newest checkpoint has one flipped bit, the learning rate is another, and the run is longer."""
    run_dir = copied.parent / "run"
    newest = run_dir / "checkpoints" / "step-00000020"
    part = next(newest.glob("*.safetensors"))
    content = bytearray(part.read_bytes())
    content[-5] ^= 1
    part.write_bytes(content)
    again = run(copied, "optimizer.lr=1e-3", "train.steps=24", "schedule.kind=constant")
    assert again.code == 0, again.errors
    assert f"passed over {newest}: file {part.name} doesn't have the checksum" in again.out
    assert f"resumed from {run_dir}/checkpoints/step-00000010" in again.out
    changes = [line for line in again.out.splitlines() if line.startswith("changed since: ")]
    assert [line.removeprefix("changed since: ") for line in changes] == [
        "optimizer.lr: 0.003 -> 0.001",
        "schedule.kind: cosine -> constant",
        "train.steps: 20 -> 24",
    ]
    kept, made = rows(run_dir), rows(undisturbed)
    steps = [row["step"] for row in kept if "split" not in row]
    assert steps == list(range(1, 25)), "each step once"
    before = [row for row in made if row["step"] <= SAVED]
    assert kept[: len(before)] == before, "what the checkpoint holds stays"
    assert {row["lr"] for row in kept if row["step"] > SAVED and "lr" in row} == {0.001}


def test_nothing_complete_is_an_error_not_a_new_start(copied: Path) -> None:
    for path in candidates(copied.parent / "run"):
        (path / "manifest.json").unlink()
    refused = run(copied)
    assert refused.code == 2 and "none of the checkpoints of" in refused.errors
    assert "step-00000020: no readable manifest.json" in refused.errors


def test_a_path_starts_another_run(copied: Path, undisturbed: Path, tmp_path: Path) -> None:
    checkpoint = undisturbed / "checkpoints" / "step-00000010"
    fork = run(copied, f"run_dir={tmp_path / 'fork'}", "--resume", checkpoint, nproc=1)
    assert fork.code == 0, fork.errors
    assert f"resumed from {checkpoint}" in fork.out and "changed since" not in fork.out
    steps = [row["step"] for row in rows(tmp_path / "fork") if "split" not in row]
    assert steps == list(range(SAVED + 1, STEPS + 1))
    mine, other = tensors(tmp_path / "fork", STEPS), tensors(undisturbed, STEPS)
    assert mine.keys() == other.keys()
    worst = max(abs(mine[name] - other[name]).max() for name in mine if name.endswith("/master"))
    assert worst < 1e-5, "on one process it is the same run but for rounding"
    refused = run(copied, "--resume", checkpoint)
    assert refused.code == 2 and "would overwrite the checkpoints that" in refused.errors


@pytest.mark.parametrize(
    "change",
    [
        "model.layers: 2 -> 3",
        "model.hidden: 32 -> 64",
        "model.vocab_size: 300 -> 400",
        "seed: 7 -> 8",
        "model.norm.scheme: hybrid_star -> pre",
        "data.sequence_length: 32 -> 16",
    ],
)
def test_what_can_not_change_is_refused(copied: Path, change: str) -> None:
    key, _, value = change.partition(": ")
    refused = run(copied, f"{key.removesuffix('.scheme')}={value.split()[-1]}")
    assert refused.code == 2 and refused.out == "" and "Traceback" not in refused.errors
    assert f"  {change} (" in refused.errors
    assert "step-00000020 is of another run, which this one can't continue" in refused.errors
    assert refused.errors.count("megnorm: ") == 1


def test_a_directory_of_another_run_without_checkpoints_is_refused(copied: Path) -> None:
    shutil.rmtree(copied.parent / "run" / "checkpoints")
    refused = run(copied, "model.layers=3")
    assert refused.code == 2 and "run/config.yaml is of another run" in refused.errors


def test_without_space_the_last_good_checkpoint_stays(copied: Path) -> None:
    """Files can't grow beyond what the metrics need, as if the device were full: every save fails."""
    run_dir = copied.parent / "run"
    before = tensors(run_dir, STEPS)
    longer = ["train.steps=24", "checkpoint.every=2", "schedule.kind=constant"]
    full = run(copied, *longer, largest_file=100_000)
    assert full.code == 74, full.errors
    assert "WARNING: the checkpoint of step 22 could not be saved" in full.out
    assert "the one of step 20 stays" in full.out
    assert (
        "the last checkpoint (step 24) could not be saved; step 20 is the last one. Free some" in full.errors
    )
    assert full.errors.count("\n") == 1 and "Traceback" not in full.out
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == [
        "latest",
        "step-00000010",
        "step-00000020",
    ]
    assert not differing(before, tensors(run_dir, STEPS))
    again = run(copied, *longer)
    assert again.code == 0, again.errors
    assert f"resumed from {run_dir}/checkpoints/step-00000020" in again.out
    assert [row["step"] for row in rows(run_dir) if "split" not in row] == list(range(1, 25))
