"""What a run leaves to be seen: metrics, TensorBoard, its configuration; and the end of a bad run."""

import json
import math
from pathlib import Path

import pytest
import yaml
from small_run import STEPS, raw_config, rows, run, write_config

from megnorm.checkpoint.storage import candidates
from megnorm.config import load_config
from megnorm.prepare import prepare


def test_metrics_hold_what_is_promised(undisturbed: Path) -> None:
    lines = [json.loads(line) for line in (undisturbed / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in lines if "split" not in row]
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    for row in steps:
        assert row["samples"] == 8 * row["step"] and row["tokens"] == 8 * 32 * row["step"]
        assert row["step_seconds"] > 0 and row["attempt"] == 1
        assert math.isclose(row["tokens_per_second"], 8 * 32 / row["step_seconds"])
        assert 0 < row["grad_norm"] < 100 and 0 < row["mfu"]
    assert abs(steps[0]["loss"] - math.log(300)) < 0.3, "nats per token: near the uniform one at first"
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5
    assert [steps[n]["lr"] for n in (0, 3, -1)] == [0.00075, 0.003, 0.0003]
    evaluations = [row for row in lines if "split" in row]
    assert [(row["step"], row["split"]) for row in evaluations] == [(n, "valid") for n in (5, 10, 15, 20)]


def test_the_console_says_the_same_and_nothing_else(undisturbed: Path) -> None:
    out = (undisturbed.parent / "output.txt").read_text()
    lines = [line for line in out.splitlines() if line.startswith("step ") and "|" in line]
    for line, row in zip(lines, [row for row in rows(undisturbed) if "split" not in row], strict=True):
        assert line.startswith(f"step {row['step']:>2}/20 | loss {row['loss']:.4f} | ")
    for said in (
        "parameters",
        "RMSNorm(x)",
        "TP=1 PP=1 DP=2",
        "5,120 tokens",
        "FLOPs",
        "estimated time",
        "saved ",
        "done: 20 steps",
    ):
        assert said in out
    assert "deepspeed" not in out.lower()
    assert (undisturbed.parent / "errors.txt").read_text() == ""


def test_tensorboard_holds_the_curves(undisturbed: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(undisturbed / "tensorboard")).Reload()
    curves = {
        "train/loss": "loss",
        "train/lr": "lr",
        "train/grad_norm": "grad_norm",
        "perf/mfu": "mfu",
        "perf/tokens_per_second": "tokens_per_second",
    }
    assert set(events.Tags()["scalars"]) == {*curves, "valid/loss"}
    metrics = [json.loads(line) for line in (undisturbed / "metrics.jsonl").read_text().splitlines()]
    for tag, name in curves.items():
        points = [(event.step, event.value) for event in events.Scalars(tag)]
        assert points == [
            (row["step"], pytest.approx(row[name], rel=1e-6)) for row in metrics if "split" not in row
        ]
    points = [(event.step, event.value) for event in events.Scalars("valid/loss")]
    assert points == [
        (row["step"], pytest.approx(row["loss"], rel=1e-6)) for row in metrics if "split" in row
    ]


def test_the_configuration_is_kept_whole(data: Path, undisturbed: Path, tmp_path: Path) -> None:
    kept = load_config(undisturbed / "config.yaml")
    given = write_config(tmp_path / "config.yaml", raw_config(data, undisturbed))
    assert prepare(str(given), [], 2, "auto").config == kept
    again = prepare(str(undisturbed / "config.yaml"), [], 2, "auto")
    assert again.config == kept and not again.changes
    assert yaml.safe_load((undisturbed / "config.yaml").read_text())["optimizer"]["betas"] == [0.9, 0.95]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_run_that_diverges_ends_without_saving_it(dtype: str, data: Path, tmp_path: Path) -> None:
    raw = raw_config(
        data,
        tmp_path / "run",
        optimizer__lr=1e30,
        schedule__min_lr=0.0,
        schedule__warmup_steps=0,
        schedule__kind="constant",
        train__dtype=dtype,
        train__eval_every=0,
    )
    command = run(write_config(tmp_path / "config.yaml", raw))
    assert command.code == 1
    assert "gradient norm" in command.errors and "nothing was saved yet" in command.errors
    assert "A lower learning rate" in command.errors and "Traceback" not in command.errors
    assert not candidates(tmp_path / "run")
    *good, last = rows(tmp_path / "run")
    assert all(math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"]) for row in good)
    assert not (math.isfinite(last["loss"]) and math.isfinite(last["grad_norm"])), (
        "the curve shows why it ended"
    )
