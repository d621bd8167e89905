"""Curves read from a run's files, smoothing, and the picture through the command."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megnorm.observe.metrics import STEP_FIELDS, MetricsWriter
from megnorm.observe.plot import plot_runs, read_curve, smooth

ROOT = Path(__file__).resolve().parents[2]


def run(run_dir: Path, offset: float = 0.0) -> Path:
    writer = MetricsWriter(run_dir)
    for step in range(1, 41):
        loss = math.nan if step == 7 else 4 + offset + 4 / step
        writer.step({**dict.fromkeys(STEP_FIELDS, 0.5), "step": step, "tokens": 100 * step, "loss": loss})
    writer.evaluation(20, "valid", 4.3)
    writer.evaluation(40, "valid", 4.2)
    writer.evaluation(40, "test", 9.9)
    writer.close()
    return run_dir


def test_curve_has_finite_steps_validation_and_baselines(tmp_path) -> None:
    run(tmp_path)
    (tmp_path / "report.json").write_text(json.dumps({"baselines": {"unigram": 6.2, "bigram": 4.5, "n": 1}}))
    curve = read_curve(tmp_path)
    assert len(curve.loss) == 39 and curve.tokens[-1] == 4000
    assert curve.valid == [(2000, 4.3), (4000, 4.2)]
    assert curve.baselines == {"unigram": 6.2, "bigram": 4.5}


def test_smoothing_keeps_lines_and_the_first_value() -> None:
    values = np.linspace(9.0, 4.0, 21)
    assert smooth(values, 3)[:-3] == pytest.approx(values[:-3])
    assert smooth(np.array([1.0, 2.0, 6.0]), 1) == pytest.approx([1.0, 3.0, 4.0])
    assert smooth(np.array([5.0]), 4) == pytest.approx([5.0])


def test_pictures_of_one_and_of_several_runs(tmp_path) -> None:
    runs = [run(tmp_path / "a"), run(tmp_path / "b", 0.2)]
    for chosen in (runs[:1], runs):
        plot_runs(chosen, tmp_path / "out.png")
        assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_tells_what_is_missing(tmp_path) -> None:
    done = subprocess.run([sys.executable, str(ROOT / "tools" / "plot_run.py"), str(tmp_path), "-o", "x.png"],
                          capture_output=True, text=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 2 and "holds no training step" in done.stderr
    assert "Traceback" not in done.stderr
