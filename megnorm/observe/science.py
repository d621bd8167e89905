"""Small experiments on norm schemes: which runs they are, what is kept of them, and their tables.

Every run is ``megnorm train CONFIG OVERRIDES``; what is measured stands in its metrics.jsonl (``observe.probe_every``).
"""

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megnorm.config import Config, load_config
from megnorm.data.indexed import IndexedDataset
from megnorm.norms import init_policy
from megnorm.observe.metrics import read_metrics

LATE = 10  # steps at the end over which a noisy number is averaged
RATES = ("1e-3", "3e-3", "1e-2")


@dataclass(frozen=True)
class Trial:
    """One run: its name within the experiment, and its changes to the experiment's configuration."""

    name: str
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Experiment:
    """configs/science/<name>.yaml run once for each trial; ``collect`` makes the result from the runs' folders."""

    name: str
    trials: tuple[Trial, ...]
    collect: Callable[[dict[str, Path]], dict[str, Any]]
    table: Callable[[dict[str, Any]], str]


def finished(run_dir: Path, steps: int) -> bool:
    """Whether the run went to its end, or to a loss that no step can mend."""
    rows = read_metrics(run_dir)
    return bool(rows) and (rows[-1]["step"] == steps or not math.isfinite(rows[-1]["loss"])
                           or not math.isfinite(rows[-1]["grad_norm"]))


def probe_rows(run_dir: Path) -> list[dict]:
    """The rows with a probe. Raises ValueError where there is none."""
    rows = [row for row in read_metrics(run_dir) if "probe" in row]
    if not rows:
        raise ValueError(f"{run_dir}: metrics.jsonl holds no probe; train with observe.probe_every above 0")
    return rows


def layer_norms(row: dict) -> list[float]:
    """Norm of each block's gradient, attention and FFN together, from the first block on."""
    parts = row["probe"]["grad_norm"]
    layers = 1 + max(int(part.split(".")[1]) for part in parts if part.startswith("layers."))
    return [math.hypot(*(_known(parts[f"layers.{layer}.{part}"]) for part in ("attention", "ffn")))
            for layer in range(layers)]


def stream_sizes(row: dict) -> list[float]:
    """Root mean square of the stream that enters the first block, and that leaves each block."""
    return [_known(value) for value in row["probe"]["residual_rms"].values()]


def _known(value: float | None) -> float:
    return math.nan if value is None else value


def _start_and_end(run_dir: Path, values: Callable[[dict], list[float]]) -> dict[str, Any]:
    """In the first step, and the medians over the probes among the last steps."""
    rows = probe_rows(run_dir)
    late = [values(row) for row in rows if row["step"] > rows[-1]["step"] - LATE]
    policy = init_policy(load_config(run_dir / "config.yaml").model)
    return {"init": policy, "start": _round(values(rows[0])),
            "end": _round(statistics.median(column) for column in zip(*late, strict=True))}


def collect_gradients(runs: dict[str, Path]) -> dict[str, Any]:
    """The gradient's norm by layer."""
    return {name: _start_and_end(path, layer_norms) for name, path in runs.items()}


def collect_stream(runs: dict[str, Path]) -> dict[str, Any]:
    """The stream's size by depth."""
    return {name: _start_and_end(path, stream_sizes) for name, path in runs.items()}


def collect_depth(runs: dict[str, Path]) -> dict[str, Any]:
    """Loss curves by scheme and learning rate, where each ended, and the loss that needs no context."""
    config = load_config(next(iter(runs.values())) / "config.yaml")
    found: dict[str, Any] = {"unigram": _number(unigram_entropy(config)), "schemes": {},
                             "uniform": _number(math.log(config.model.vocab_size))}
    for name, path in runs.items():
        scheme, rate = name.split("@")
        rows = [row for row in read_metrics(path) if "split" not in row]
        late = statistics.fmean(row["loss"] for row in rows[-LATE:])
        found["schemes"].setdefault(scheme, {})[rate] = {
            "steps": len(rows), "end": _number(late), "state": state(late, found["unigram"], found["uniform"]),
            "largest_grad_norm": _number(max(row["grad_norm"] for row in rows[LATE:] or rows)),
            "losses": _round(row["loss"] for row in rows)}
    return found


def state(loss: float, unigram: float, uniform: float) -> str:
    """diverged: not finite, or worse than no model at all; stuck: context brought less than 1 %; learned."""
    if not loss <= uniform:
        return "diverged"
    return "learned" if loss < 0.99 * unigram else "stuck"


def unigram_entropy(config: Config) -> float:
    """Entropy of the training tokens' frequencies in nats: the best loss that ignores context."""
    counts = np.zeros(config.model.vocab_size, np.int64)
    for _, prefix in config.data.train:
        for _, tokens in IndexedDataset(prefix).token_blocks():
            counts += np.bincount(tokens, minlength=len(counts))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def gradients_table(result: dict[str, Any]) -> str:
    """First and last layer, and how many times the largest is the smallest, at both times."""
    rows = [(name, found["init"], *(f"{cell:.3g}" for when in ("start", "end") for cell in (
        found[when][0], found[when][-1], found[when][0] / found[when][-1]))) for name, found in result.items()]
    return markdown(("scheme", "init", "first layer, step 1", "last layer, step 1", "first / last, step 1",
                     "first layer, step 100", "last layer, step 100", "first / last, step 100"), rows)


def stream_table(result: dict[str, Any]) -> str:
    """The stream at a few depths, and the power of the depth with which it grows over the second half."""
    rows = []
    for name, found in result.items():
        depth = len(found["start"]) - 1
        cells = [f"{found[when][at]:.3g}" for when in ("start", "end") for at in (1, depth // 4, depth)]
        powers = [f"{growth(found[when]):+.2f}" for when in ("start", "end")]
        rows.append((name, found["init"], *cells[:3], powers[0], *cells[3:], powers[1]))
    marks = (1, depth // 4, depth)
    heads = [f"block {at}, step {step}" for step in (1, 100) for at in marks]
    return markdown(("scheme", "init", *heads[:3], "power, step 1", *heads[3:], "power, step 100"), rows)


def growth(sizes: list[float]) -> float:
    """p of the best fit size ~ block^p over the second half of the depth: 0 constant, 1/2 for variances that add."""
    blocks = np.arange(len(sizes) // 2, len(sizes))
    return float(np.polyfit(np.log(blocks), np.log(np.asarray(sizes)[blocks]), 1)[0])


def depth_table(result: dict[str, Any]) -> str:
    """The loss at the end, and what became of each run."""
    rows = []
    for scheme, by_rate in result["schemes"].items():
        rows.append((scheme, *(_outcome(run) for run in by_rate.values())))
    return markdown(("scheme", *(f"lr {rate}" for rate in next(iter(result["schemes"].values())))), rows)


def _outcome(run: dict[str, Any]) -> str:
    if run["state"] == "diverged":
        return f"**diverged** (step {run['steps']})" if run["end"] is None else f"**diverged** ({run['end']:.2f})"
    return f"{run['end']:.2f}" if run["state"] == "learned" else f"**stuck** ({run['end']:.2f})"


def markdown(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table."""
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _round(values: Iterable[float]) -> list[float | None]:
    return [_number(value) for value in values]


def _number(value: float) -> float | None:
    """Four digits; JSON has no NaN."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


DEEP = ("post", "deepnorm", "pre", "peri", "hybrid_star")


def _schemes(*names: str) -> tuple[Trial, ...]:
    return tuple(Trial(name, (f"model.norm={name}",)) for name in names)


EXPERIMENTS = {experiment.name: experiment for experiment in (
    Experiment("gradients", _schemes("post", "pre", "peri", "hybrid", "hybrid_star", "normformer"),
               collect_gradients, gradients_table),
    Experiment("depth", tuple(Trial(f"{name}@{rate}", (f"model.norm={name}", f"optimizer.lr={rate}"))
                              for name in DEEP for rate in RATES),
               collect_depth, depth_table),
    Experiment("stream", _schemes("post", "pre", "peri", "deepnorm", "hybrid_star", "lns"),
               collect_stream, stream_table),
)}
