"""The small experiments: what is kept of their runs, their tables and pictures."""

import math
from pathlib import Path

import numpy as np
import pytest
import yaml

from megnorm.config import load_config
from megnorm.data.indexed import IndexedWriter
from megnorm.norms import placement_of
from megnorm.observe.metrics import STEP_FIELDS, MetricsWriter
from megnorm.observe.science import EXPERIMENTS, finished, growth, markdown, state, unigram_entropy
from megnorm.observe.science_plot import COLOURS, NAMES, draw

ROOT = Path(__file__).resolve().parents[2]
LAYERS = 3


def write_run(folder, losses, probe=None):
    """A run's folder: metrics with these losses, each with a probe where one is given."""
    raw = yaml.safe_load((ROOT / "configs/science/gradients.yaml").read_text())
    raw["model"]["vocab_size"] = 4096
    raw["data"]["train"] = str(folder.parent / "corpus")
    writer = MetricsWriter(folder)
    for step, loss in enumerate(losses, 1):
        row = {**dict.fromkeys(STEP_FIELDS, 1.0), "step": step, "loss": loss}
        writer.step({**row, "probe": probe(step)} if probe else row)
    writer.close()
    (folder / "config.yaml").write_text(yaml.safe_dump(raw))
    return folder


def probe(step):
    """Gradients 5 s, 10 s, 15 s in the layers, streams 1, 2, 4, 8."""
    return {"grad_norm": {"embedding": 1.0, **{f"layers.{n}.{part}": step * (n + 1) * size for n in range(LAYERS)
                                               for part, size in (("attention", 3.0), ("ffn", 4.0))}},
            "residual_rms": {"input": 1.0, **{f"layers.{n}": 2.0 ** (n + 1) for n in range(LAYERS)}}}


@pytest.fixture
def corpus(tmp_path):
    with IndexedWriter(tmp_path / "corpus", np.uint16) as writer:
        writer.add_document([5] * 4 + [6] * 2)
        writer.add_document([7] * 2)
    return tmp_path


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=lambda one: one.name)
def test_every_trial_is_a_configuration(experiment):
    for trial in experiment.trials:
        config = load_config(ROOT / f"configs/science/{experiment.name}.yaml", list(trial.overrides))
        assert len(placement_of(config.model).blocks) == config.model.layers
        scheme = trial.name.split("@")[0]
        assert config.model.norm.scheme == scheme and scheme in COLOURS and scheme in NAMES


def test_gradients_are_of_whole_layers_at_both_times(tmp_path, corpus):
    run = write_run(tmp_path / "post", [3.0] * 30, probe)
    result = EXPERIMENTS["gradients"].collect({"post": run})
    assert result["post"]["start"] == [5.0, 10.0, 15.0]
    assert result["post"]["end"] == [127.5, 255.0, 382.5], "the median of steps 21 to 30"
    last = EXPERIMENTS["gradients"].table(result).splitlines()[-1]
    assert last == f"| post | {result['post']['init']} | 5 | 15 | 0.333 | 128 | 382 | 0.333 |"


def test_streams_begin_with_what_enters_the_first_block(tmp_path, corpus):
    run = write_run(tmp_path / "pre", [3.0] * 30, probe)
    assert EXPERIMENTS["stream"].collect({"pre": run})["pre"]["start"] == [1.0, 2.0, 4.0, 8.0]


def test_a_run_without_probes_is_refused(tmp_path, corpus):
    with pytest.raises(ValueError, match="probe_every"):
        EXPERIMENTS["stream"].collect({"pre": write_run(tmp_path / "pre", [3.0])})


def test_depth_tells_learned_stuck_and_diverged_runs_apart(tmp_path, corpus):
    learning = [*np.linspace(8.0, 0.5, 20)]
    runs = {f"{name}@1e-3": write_run(tmp_path / name, losses) for name, losses in (
        ("pre", learning), ("post", [1.2] * 20), ("hybrid", [8.0] * 12 + [math.nan]), ("peri", [9.0] * 20))}
    result = EXPERIMENTS["depth"].collect(runs)
    assert result["unigram"] == pytest.approx(1.5 * math.log(2), rel=1e-3) and result["uniform"] == 8.318
    states = {scheme: found["1e-3"]["state"] for scheme, found in result["schemes"].items()}
    assert states == {"pre": "stuck", "post": "stuck", "hybrid": "diverged", "peri": "diverged"}
    table = EXPERIMENTS["depth"].table(result)
    assert "**diverged** (step 13)" in table and "**stuck** (1.20)" in table and "**diverged** (9.00)" in table


def test_states():
    assert state(1.0, 1.5, 8.0) == "learned" and state(1.5, 1.5, 8.0) == "stuck" and state(8.1, 1.5, 8.0) == "diverged"
    assert state(math.nan, 1.5, 8.0) == "diverged"


def test_growth_is_the_power_of_the_depth():
    assert growth([9.0] + [math.sqrt(n) for n in range(1, 65)]) == pytest.approx(0.5)
    assert growth([1.0] * 65) == pytest.approx(0.0)


def test_entropy_of_the_corpus(corpus):
    run = write_run(corpus / "run", [1.0])
    assert unigram_entropy(load_config(run / "config.yaml")) == pytest.approx(1.5 * math.log(2))


def test_a_run_is_finished_at_its_last_step_or_when_nothing_can_mend_it(tmp_path):
    assert not finished(tmp_path / "none", 3)
    assert not finished(write_run(tmp_path / "half", [1.0, 1.0]), 3)
    assert finished(write_run(tmp_path / "whole", [1.0] * 3), 3)
    assert finished(write_run(tmp_path / "broken", [1.0, math.nan]), 3)


def test_markdown():
    assert markdown(("a", "b"), [("1", "2")]) == "| a | b |\n| --- | --- |\n| 1 | 2 |\n"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_pictures_are_drawn(tmp_path, name):
    pytest.importorskip("matplotlib")
    if name == "depth":
        run = {"steps": 9, "end": 2.0, "state": "learned", "losses": [8.0 - n for n in range(8)] + [None]}
        result = {"unigram": 6.0, "uniform": 8.3, "schemes": {"post": {"1e-3": run, "1e-2": {**run, "state": "diverged"}}}}
    else:
        result = {scheme: {"start": [1.0, 2.0, 4.0], "end": [1.0, None, 3.0]} for scheme in ("pre", "peri")}
    draw(name, result, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_costs_of_a_scheme_are_whole():
    from megnorm.testing.bench_norms import measure
    from megnorm.testing.bench_step import Shape
    from megnorm.testing.ranks import run_ranks

    shape = Shape(hidden=32, layers=2, heads=4, kv_heads=2, ffn_hidden=64, vocab=64, sequence=16, batch=2)
    (found,) = run_ranks(measure, 1, shape, ["pre", "peri", "custom"], 3)
    assert all(len(one.steps) == 3 and min(one.steps) > 0 for one in found.values())
    assert found["custom"].norms == 0.0 < found["pre"].norms < max(found["pre"].steps)
    weights = 4 * (2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64) + 64 * 32)
    assert 4 * weights < found["custom"].peak < found["pre"].peak < found["peri"].peak < 8 * weights


def test_limits_are_for_one_stream_and_torch_attention():
    from megnorm.testing.bench_norms import known_schemes, limit

    assert limit("hybrid_star") == 1.10 and limit("peri") == 1.25
    assert limit("residual") is None and limit("gemma2") is None
    assert known_schemes()[0] == "pre" and len(set(known_schemes())) == len(known_schemes())
