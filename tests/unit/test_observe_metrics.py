"""metrics.jsonl over kills, roll-backs and odd numbers; TensorBoard holds the same points."""

import json
import math

import pytest

from megnorm.observe.metrics import STEP_FIELDS, MetricsError, MetricsWriter, NullSink, read_metrics
from megnorm.observe.tensorboard import TensorBoard


def row(step: int, loss: float = 2.0) -> dict:
    return {**dict.fromkeys(STEP_FIELDS, 0.5), "step": step, "samples": 4 * step, "tokens": 32 * step,
            "loss": loss}


def write(run_dir, start: int, stop: int, loss: float = 2.0) -> MetricsWriter:
    writer = MetricsWriter(run_dir, start)
    for step in range(start + 1, stop + 1):
        writer.step(row(step, loss))
    return writer


def test_a_line_is_there_as_soon_as_it_is_written(tmp_path) -> None:
    writer = write(tmp_path, 0, 2)
    writer.evaluation(2, "valid", 1.5)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 2]
    assert json.loads(lines[2]) == {"step": 2, "split": "valid", "loss": 1.5, "attempt": 1}
    assert read_metrics(tmp_path)[0] == {**row(1), "attempt": 1}


def test_a_roll_back_leaves_one_row_a_step(tmp_path) -> None:
    """Bug report K19-3: killed after 7 steps, resumed from the checkpoint of step 5."""
    write(tmp_path, 0, 7).evaluation(6, "valid", 9.0)
    write(tmp_path, 5, 8, loss=3.0).close()
    rows = read_metrics(tmp_path)
    assert [r["step"] for r in rows] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [r["attempt"] for r in rows] == [1] * 5 + [2] * 3
    assert [r["loss"] for r in rows] == [2.0] * 5 + [3.0] * 3
    assert write(tmp_path, 8, 9).attempt == 3


def test_an_unbroken_resume_changes_no_byte(tmp_path) -> None:
    write(tmp_path, 0, 5).evaluation(5, "valid", 1.0)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    MetricsWriter(tmp_path, 5)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_a_start_from_scratch_drops_what_was_there(tmp_path) -> None:
    write(tmp_path, 0, 5).evaluation(0, "valid", 8.0)
    writer = write(tmp_path, 0, 1)
    assert writer.attempt == 2 and [r["step"] for r in read_metrics(tmp_path)] == [1]


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_torn_last_line_is_dropped(tmp_path, cut: int) -> None:
    write(tmp_path, 0, 3)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    whole = 3 if cut == 1 else 2  # without its line end only, the row is whole
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2, 3][:whole]
    write(tmp_path, whole, 4).close()
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2, 3, 4]
    assert not list(tmp_path.glob("*.tmp"))


def test_damage_elsewhere_is_told(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"ste\n{"step": 3}\n')
    with pytest.raises(MetricsError, match="line 2 of 3"):
        MetricsWriter(tmp_path, 3)


def test_numbers_that_json_lacks_come_back(tmp_path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.step({**row(1, loss=math.nan), "grad_norm": math.inf})
    raw = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert raw["loss"] is None and raw["nonfinite"] == {"loss": "nan", "grad_norm": "inf"}
    back = read_metrics(tmp_path)[0]
    assert math.isnan(back["loss"]) and back["grad_norm"] == math.inf and "nonfinite" not in back
    MetricsWriter(tmp_path, 1)
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == raw


def test_a_row_without_a_field_is_a_fault(tmp_path) -> None:
    with pytest.raises(AssertionError, match="grad_norm"):
        MetricsWriter(tmp_path).step({key: value for key, value in row(1).items() if key != "grad_norm"})


def test_no_file_is_no_rows_and_the_null_sink_takes_all(tmp_path) -> None:
    assert read_metrics(tmp_path) == []
    sink = NullSink()
    sink.step(row(1)), sink.evaluation(1, "valid", 1.0), sink.sync(), sink.close()
    assert not list(tmp_path.iterdir())


def test_tensorboard_forgets_the_rolled_back_steps(tmp_path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start, stop, loss in ((0, 7, 2.0), (5, 8, 3.0)):
        board = TensorBoard(tmp_path, start)
        for step in range(start + 1, stop + 1):
            board.step({**row(step, loss), "mfu": None})
        board.evaluation(stop, "valid", loss)
        board.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [
        (n, 2.0 if n <= 5 else 3.0) for n in range(1, 9)]
    assert [(e.step, e.value) for e in events.Scalars("valid/loss")] == [(8, 3.0)]
    assert set(events.Tags()["scalars"]) == {
        "train/loss", "train/lr", "train/grad_norm", "perf/tokens_per_second", "valid/loss"}
