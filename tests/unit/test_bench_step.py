"""The benchmark of a training step: its contestants train the same model, its figures are the right quotients."""

import importlib.util
import math
import os
from pathlib import Path

import pytest
from rich.console import Console

from megnorm.launcher import MALLOC_SETTINGS
from megnorm.testing import bench_step
from megnorm.testing.bench_step import CONTESTANTS, SHAPES, Comparison, Cost, Shape, compare
from megnorm.testing.ranks import run_ranks

TINY = Shape(hidden=16, layers=2, heads=4, kv_heads=2, ffn_hidden=24, vocab=128, sequence=8, batch=2)
COSTS = {"pre": 2.0, "hybrid_star": 2.5, "plain pre": 1.6, "transformers": 3.0, "floor": 1.0}


def three_losses(name, dtype):
    step = bench_step.make_step(name, TINY, dtype)
    results = [step() for _ in range(3)]
    return [None if r is None else float(getattr(r, "loss", r)) for r in results]


def parameters_of(name):
    from megnorm.testing import bench_contestants as make

    if name == "transformers":
        seen = []
        make.training_loop = lambda parameters, loss: seen.extend(parameters)
        make.transformers_llama(TINY, "fp32")
    else:
        config = make.bench_config(TINY, "fp32", name)
        seen = list(make.build_module(config, make.alone(config)).parameters())
    return sum(p.numel() for p in seen)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", [name for name in CONTESTANTS if name != "floor"])
def test_contestants_train(name, dtype):
    (losses,) = run_ranks(three_losses, 1, name, dtype)
    assert losses[2] < losses[0]  # the batch is the same each time
    assert abs(losses[0] - math.log(TINY.vocab)) < 0.5


def test_contestants_have_the_same_parameters():
    (ours,), (theirs,) = run_ranks(parameters_of, 1, "pre"), run_ranks(parameters_of, 1, "transformers")
    norms = TINY.hidden * (2 * TINY.layers + 1)
    assert ours == theirs == sum(a * b for a, b in TINY.matrices) + norms


def test_shape_m_has_the_size_of_the_notes():
    shape = SHAPES["M"]
    assert round((sum(a * b for a, b in shape.matrices) + shape.hidden * (2 * shape.layers + 1)) / 1e6, 1) == 163.0


def test_ratio_compares_steps_of_one_turn():
    """A load that doubles both in one turn, or hits one step, leaves the ratio."""
    pre, other = [1.0, 2.0, 1.0, 1.0, 1.0], [1.5, 3.0, 1.5, 9.0, 1.5]
    result = Comparison("S", "fp32", {"pre": [Cost(c, c) for c in pre], "transformers": [Cost(c, c) for c in other]})
    assert result.ratio("transformers", "pre") == 1.5
    assert result.median("transformers") == 1.5


def test_a_contestant_lives_in_a_process_of_its_own(monkeypatch):
    monkeypatch.setenv("MALLOC_TOP_PAD_", "1")
    before = dict(os.environ)
    result = compare("S", "fp32", steps=1, threads=1, equal_malloc=True, contestants=("floor",))
    assert len(result.costs["floor"]) == 1 and result.costs["floor"][0].cpu > 0
    assert dict(os.environ) == before


def test_environment_of_a_contestant():
    before = dict(os.environ)
    with bench_step._environment({"OMP_NUM_THREADS": "3", **MALLOC_SETTINGS}):
        assert os.environ["OMP_NUM_THREADS"] == "3"
        with bench_step._environment({}, dropped=MALLOC_SETTINGS):
            assert not set(MALLOC_SETTINGS) & set(os.environ)
    assert dict(os.environ) == before


def test_tables_show_ratios_beside_goals():
    tool = Path(__file__).resolve().parents[2] / "tools" / "bench_step.py"
    spec = importlib.util.spec_from_file_location("bench_step_tool", tool)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    results = [Comparison(shape, dtype, {name: [Cost(c, c)] * 2 for name, c in COSTS.items()})
               for shape in SHAPES for dtype in ("fp32", "bf16")]
    console = Console(width=120, record=True, file=open(os.devnull, "w"))
    console.print(module.costs_table(results), module.ratios_table(results))
    text = console.export_text()
    for shown in ("1.500 +1.20", "1.200 +1.35", "1.250 -1.02", "0.500 +0.92", "1,024"):
        assert shown in text, text
