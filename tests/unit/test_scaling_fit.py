"""Results as people have them: tables, missing columns, diverged runs, too little data; schemes compared."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megnorm.scaling.commands import fit_command
from megnorm.scaling.errors import ScalingError
from megnorm.scaling.fit import analyse, held_out
from megnorm.scaling.laws import FORMS
from megnorm.scaling.results import read_results, usable
from megnorm.scaling.words import lines

OFFSET = {"pre": 0.03, "hybrid_star": 0.0}
DRAWS = 25


def row(scheme: str = "pre", size: float = 1e6, tokens: float = 1e7, noise: float = 0.0, **more) -> dict:
    loss = 1.8 + OFFSET.get(scheme, 0.0) + 60 / size**0.35 + 520 / tokens**0.366
    return {
        "scheme": scheme,
        "parameters": size + 1e5,
        "non_embedding": size,
        "tokens": tokens,
        "flops": 6 * size * tokens,
        "loss": loss * np.exp(noise),
        "seed": 1,
        **more,
    }


def grid(*schemes: str, noise: float = 0.0, sizes: int = 5, budgets: int = 4) -> list[dict]:
    rng = np.random.default_rng(0)
    shared = rng.standard_normal((sizes, budgets))
    return [
        row(scheme, size, tokens, noise * (shared[i, j] + 0.2 * rng.standard_normal()))
        for scheme in schemes
        for i, size in enumerate(np.logspace(5.3, 6.7, sizes))
        for j, tokens in enumerate(np.logspace(6.3, 7.5, budgets))
    ]


def refusal(rows: list[dict], form: str = "chinchilla") -> str:
    with pytest.raises(ScalingError) as caught:
        analyse(usable(rows)[0], form, draws=DRAWS)
    return str(caught.value)


def test_both_counts_of_n_are_fitted_and_differ() -> None:
    analysis = analyse(usable(grid("pre"))[0], draws=DRAWS)
    total, without = (
        analysis["schemes"]["pre"][count]["constants"]["alpha"]["value"] for count in ("total", "non_embedding")
    )
    assert without == pytest.approx(0.35, abs=1e-3) and total > 0.4
    text = "\n".join(lines(analysis))
    assert all(words in text for words in ("pre, N with embeddings", "pre, N without embeddings", "IsoFLOP: needs 2"))


def test_experts_are_fitted_by_active_parameters() -> None:
    """Six of seven parameters idle: compute, optimum and pairs go by the others."""
    rows = grid("dense", "experts")
    for one in rows:
        one["active"] = one["parameters"]
        if one["scheme"] == "experts":
            one.update(parameters=7 * one["active"], non_embedding=7 * one["active"] - 1e5, loss=one["loss"] - 0.05)
    analysis = analyse(usable(rows)[0], draws=DRAWS)
    laws = analysis["schemes"]["experts"]
    assert list(laws) == ["total", "non_embedding", "active"] and "active N" in analysis["compared_with"]
    best, idle = (laws[count]["optima"][0] for count in ("active", "total"))
    assert best["parameters"]["value"] < idle["parameters"]["value"] / 2
    (item,) = analysis["comparisons"]
    assert item["pairs"] == 20 and item["measured"] == pytest.approx(0.05, abs=1e-3)
    assert any("times 6 N D (active N)" in note for note in analysis["notes"])
    assert "experts, active N" in "\n".join(lines(analysis))
    rows[0].pop("flops")
    rows[-1].pop("flops")
    first, *_, last = usable(rows)[0]
    assert [first.flops, last.flops] == [6 * run.active * run.tokens for run in (first, last)]


def test_paired_comparison_is_surer_than_the_noise() -> None:
    """Noise of 1 % that both schemes share: an unpaired difference of 0.03 in a loss of 4 would drown in it."""
    analysis = analyse(usable(grid("pre", "hybrid_star", noise=0.01))[0], budgets=[1e14], draws=DRAWS)
    (item,) = analysis["comparisons"]
    assert item["pairs"] == 20 and item["measured"] == pytest.approx(0.03, abs=0.015)
    low, high = item["measured_interval"]
    assert 0 < low < high and high - low < 0.02
    (at,) = item["at_budgets"]
    assert at["winner"] == "hybrid_star" and at["sure"] > 0.9 and at["interval"][0] < at["difference"]


def test_the_largest_run_is_predicted_without_being_seen() -> None:
    results = usable(grid("pre", noise=0.001))[0]
    largest = max(results, key=lambda run: run.flops)
    held = held_out(FORMS["chinchilla"], results, "non_embedding", DRAWS)
    assert held["run"] == largest.name and abs(held["error"]) < 0.02
    changed = [run if run is not largest else type(run)(**{**run.__dict__, "loss": run.loss * 2}) for run in results]
    assert held_out(FORMS["chinchilla"], changed, "non_embedding", DRAWS)["predicted"] == held["predicted"]


def test_refusals_say_why() -> None:
    whole = grid("pre")
    two_sizes = [r for r in whole if r["non_embedding"] < 6e5]
    assert "2 sizes of model can't carry" in refusal(two_sizes) and "at least 3" in refusal(two_sizes)
    assert "2 numbers of tokens" in refusal(grid("pre", budgets=2))
    one_ratio = [row(size=size, tokens=20 * (size + 1e5)) for size in np.logspace(5, 8, 8)]
    said = refusal(one_ratio)
    assert "tokens per parameter 20 to 20" in said and "--form power" in said
    assert "5 runs" in refusal(grid("pre", sizes=3, budgets=3)[::2])
    assert "use --form chinchilla" in refusal(whole, "power")
    assert "choose one of chinchilla, power, kaplan" in refusal(whole, "cubic")


def test_one_ratio_carries_the_power_law() -> None:
    rows = [row(size=size, tokens=20 * (size + 1e5)) for size in np.logspace(5, 8, 8)]
    analysis = analyse(usable(rows)[0], "power", draws=DRAWS)
    assert analysis["schemes"]["pre"]["total"]["held_out"]["error"] == pytest.approx(0, abs=0.05)


def test_diverged_and_unfinished_runs_are_left_out_and_named() -> None:
    rows = grid("pre")
    rows[3]["loss"], rows[3]["name"] = float("nan"), "bad-one"
    rows[4].update(state="running", name="slow-one")
    results, notes = usable(rows)
    assert len(results) == 18 and "bad-one (loss nan)" in notes[0] and "slow-one (running)" in notes[1]
    assert any("bad-one" in line for line in lines(analyse(results, draws=DRAWS, notes=notes)))


def test_only_the_best_learning_rate_of_a_cell_counts() -> None:
    rows = [row(lr=lr, seed=seed, noise=noise) for lr, noise in ((1e-3, 0.0), (3e-3, 0.1)) for seed in (1, 2)]
    rows[2]["loss"] = rows[0]["loss"] - 0.01  # one lucky seed of the worse rate
    results, notes = usable(rows)
    assert [run.lr for run in results] == [1e-3, 1e-3] and "2 with another learning rate" in notes[0]


def test_tables_are_read_in_three_formats(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("N,D,L\n1e6,2e7,3.5\n2e6,2e7,3.25\n")
    (tmp_path / "a.jsonl").write_text('{"N": 1e6, "D": 2e7, "L": 3.5}\n{"N": 2e6, "D": 2e7, "L": 3.25}\n')
    (tmp_path / "a.json").write_text(
        json.dumps(
            {
                "results": [
                    {"parameters": 1e6, "tokens": 2e7, "loss": 3.5},
                    {"parameters": 2e6, "tokens": 2e7, "loss": 3.25},
                ]
            }
        )
    )
    read = [
        [(run.parameters, run.tokens, run.loss, run.flops) for run in read_results(tmp_path / name)[0]]
        for name in ("a.csv", "a.jsonl", "a.json")
    ]
    assert read[0] == read[1] == read[2] == [(1e6, 2e7, 3.5, 1.2e14), (2e6, 2e7, 3.25, 2.4e14)]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "N,tokens,perplexity\n1,2,3\n", "lacks the column loss; found: N, tokens, perplexity"),
        ("a.csv", "N,D,L\n1e6,many,3\n", "row 1: tokens='many' is not a number"),
        ("a.csv", "N,D,L\n-1,2,3\n", "row 1: parameters='-1' must be a number above 0"),
        ("a.csv", "", "holds no result"),
        ("a.json", "{", "not valid JSON"),
        ("a.json", "[1]", "expected a list of objects"),
        ("a.txt", "", "not .txt"),
    ],
)
def test_bad_tables_are_one_clear_message(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ScalingError, match=said.replace(".", r"\.").replace("[", r"\[")):
        read_results(tmp_path / name)


def test_a_folder_without_cells_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScalingError, match="no cell of a sweep"):
        read_results(tmp_path)


def test_the_command_prints_and_writes_the_analysis(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(json.dumps(grid("pre")))
    said = fit_command(str(tmp_path / "r.json"), "chinchilla", [1e18], DRAWS, str(tmp_path / "fit.json"))
    assert any("best for 1e+18 FLOPs" in line for line in said)
    assert json.loads((tmp_path / "fit.json").read_text())["form"] == "chinchilla"


def test_fits_import_no_torch() -> None:
    code = "import sys, megnorm.scaling.commands; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
