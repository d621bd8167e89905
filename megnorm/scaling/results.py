"""Results of runs: one row a run, from a table in a file or from the directory of a sweep."""

import csv
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megnorm.scaling.errors import ScalingError
from megnorm.scaling.laws import Points

# Column: other spellings that are read too.
REQUIRED = {"parameters": ("N", "n", "params"), "tokens": ("D", "d"), "loss": ("L", "valid_loss")}
SIZES = ("non_embedding", "active")
OPTIONAL = {**dict.fromkeys(SIZES, ()), "flops": ("C", "c"), "scheme": (), "seed": (), "lr": (), "name": ("run",)}


@dataclass(frozen=True)
class Result:
    """One finished run. parameters: N with embeddings; non_embedding: without; active: those that a token passes
    (with embeddings; fewer than all where there are experts); tokens: D, what it was trained on; loss: nats per
    token; flops: of the training, 6 N D of the active parameters where the table has none. None where unknown."""

    name: str
    scheme: str
    parameters: float
    non_embedding: float | None
    tokens: float
    flops: float
    loss: float
    seed: Any = None
    lr: Any = None
    active: float | None = None

    @property
    def computing(self) -> float:
        """The N that stands for compute: the active parameters, where the table has them."""
        return self.active or self.parameters

    def size(self, count: str) -> float | None:
        """N; count says which one is meant: "total", "non_embedding" or "active"."""
        return self.parameters if count == "total" else getattr(self, count)


def read_results(path: str | Path) -> tuple[list[Result], list[str]]:
    """Results of a CSV, JSON or JSONL file (or of a sweep's directory), and what was left out, in words.

    Columns: parameters, tokens, loss; further non_embedding, active, flops, scheme, seed, lr, name, state.
    Raises ScalingError.
    """
    path = Path(path)
    if path.is_dir():
        from megnorm.scaling.cells import result_rows

        rows = result_rows(path)
        if not rows:
            raise ScalingError(
                f"{path} holds no cell of a sweep (cells/NAME/cell.json): give the folder that `megnorm "
                "sweep` made (its `dir`), or a table of results"
            )
    else:
        rows = read_rows(path)
    if not rows:
        raise ScalingError(f"{path} holds no result")
    return usable([spelled(row, str(path)) for row in rows])


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a table; of JSON a list, or an object with the list under "results"."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScalingError(f"cannot read results from {path}: {getattr(error, 'strerror', None) or error}") from None
    kind = path.suffix.lower()
    try:
        if kind == ".csv":
            return list(csv.DictReader(text.splitlines()))
        if kind == ".jsonl":
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        elif kind == ".json":
            rows = json.loads(text)
        else:
            raise ScalingError(
                f"{path}: results are read from .csv, .json, .jsonl or a sweep's directory, not "
                f"{kind or 'a file without suffix'}"
            )
    except json.JSONDecodeError as error:
        raise ScalingError(f"{path} is not valid JSON: {error}") from None
    rows = rows["results"] if isinstance(rows, dict) and "results" in rows else rows
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ScalingError(f'{path}: expected a list of objects, one a run (or {{"results": [...]}})')
    return rows


def spelled(row: dict[str, Any], origin: str) -> dict[str, Any]:
    """The row under this system's names of columns. Raises ScalingError when a needed one is missing."""
    found = dict(row)
    for name, others in {**REQUIRED, **OPTIONAL}.items():
        other = next((other for other in others if other in row), None)
        if name not in row and other is not None:
            found[name] = row[other]
    missing = [name for name in REQUIRED if name not in found]
    if missing:
        raise ScalingError(
            f"{origin} lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}; found: "
            f"{', '.join(map(str, row)) or 'none'}. A row needs parameters (or N), tokens (or D), loss "
            "(or L); non_embedding, active, flops (or C), scheme, seed, lr, name are read when there"
        )
    return found


def usable(rows: list[dict[str, Any]]) -> tuple[list[Result], list[str]]:
    """Results of the runs that ended well, and a sentence for each group of those left out."""
    results, unfinished, broken = [], [], []
    for number, row in enumerate(rows, start=1):
        name = str(row.get("name") or f"row {number}")
        loss = _number(row["loss"], name, "loss")
        if not (math.isfinite(loss) and loss > 0) and row["loss"] not in (None, ""):
            broken.append(f"{name} (loss {row['loss']})")
            continue
        if row.get("state", "done") != "done" or not math.isfinite(loss):
            unfinished.append(f"{name} ({row.get('state') or 'no loss'})")
            continue
        size, tokens = (_positive(row[key], name, key) for key in ("parameters", "tokens"))
        without, active, flops = (
            _positive(row[key], name, key) if row.get(key) not in (None, "") else None
            for key in (*SIZES, "flops")
        )
        results.append(
            Result(
                name,
                str(row.get("scheme") or "all"),
                size,
                without,
                tokens,
                flops or 6 * (active or size) * tokens,
                loss,
                row.get("seed"),
                row.get("lr"),
                active,
            )
        )
    notes = [
        f"left out, {what}: {', '.join(names)}"
        for what, names in (("loss not finite (diverged)", broken), ("not done", unfinished))
        if names
    ]
    best, note = best_learning_rates(results)
    return best, notes + note


def best_learning_rates(results: list[Result]) -> tuple[list[Result], list[str]]:
    """Of runs that differ in the learning rate only, those of the best rate (by the mean over seeds)."""
    by_cell: dict[tuple, dict[Any, list[Result]]] = {}
    for result in results:
        cell = (result.scheme, result.parameters, result.tokens)
        by_cell.setdefault(cell, {}).setdefault(result.lr, []).append(result)
    kept = [min(rates.values(), key=lambda runs: np.mean([run.loss for run in runs])) for rates in by_cell.values()]
    best = [run for runs in kept for run in runs]
    dropped = len(results) - len(best)
    note = [f"of {len(results)} runs, {dropped} with another learning rate than their cell's best were left out"]
    return best, note if dropped else []


def points_of(results: list[Result], count: str) -> Points:
    """What a fit takes; count: the N that is meant, as in ``Result.size``."""
    sizes = [run.size(count) for run in results]
    return Points(
        *(
            np.log(np.array(values, float))
            for values in (
                sizes,
                [r.tokens for r in results],
                [r.flops for r in results],
                [r.loss for r in results],
            )
        )
    )


def by_scheme(results: list[Result]) -> dict[str, list[Result]]:
    """The results of each scheme, in the order in which the schemes appear."""
    schemes: dict[str, list[Result]] = {}
    for result in results:
        schemes.setdefault(result.scheme, []).append(result)
    return schemes


def _number(value: Any, name: str, column: str) -> float:
    if value in (None, ""):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ScalingError(f"{name}: {column}={value!r} is not a number") from None


def _positive(value: Any, name: str, column: str) -> float:
    number = _number(value, name, column)
    if not (math.isfinite(number) and number > 0):
        raise ScalingError(f"{name}: {column}={value!r} must be a number above 0")
    return number
