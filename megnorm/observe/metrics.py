"""``metrics.jsonl``: one JSON object a line, safe against kills, one row a step over all attempts."""

import errno
import io
import json
import math
import os
from pathlib import Path

FILE = "metrics.jsonl"
STEP_FIELDS = ("step", "samples", "tokens", "loss", "grad_norm", "lr", "step_seconds", "tokens_per_second",
               "mfu")


class MetricsError(ValueError):
    """A metrics file that is damaged elsewhere than in its last line."""


def read_metrics(run_dir: str | Path) -> list[dict]:
    """All rows of a run, in order: steps, and evaluations (rows with "split").

    A last line that a kill tore is left out; no file is no rows. Numbers that JSON lacks (NaN, infinities)
    come back as floats from the row's "nonfinite" field. Raises MetricsError for a damaged line before
    the last.
    """
    return _parse(Path(run_dir) / FILE)[0]


class MetricsWriter:
    """Appends to ``<run_dir>/metrics.jsonl``; every row is handed to the operating system at once.

    Opening repairs the file: a torn last line is dropped, and rows beyond ``start_step`` (the steps that the
    loaded checkpoint holds; 0 for a start from scratch, which drops all) are removed, since this attempt
    makes those steps again. Each row carries the attempt's number: 1 for the first process that wrote to the
    file, then counting up.
    """

    def __init__(self, run_dir: str | Path, start_step: int = 0) -> None:
        self.path = Path(run_dir) / FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows, damaged = _parse(self.path)
        kept = [row for row in rows if row["step"] <= start_step] if start_step else []
        self.attempt = 1 + max((row.get("attempt", 0) for row in rows), default=0)
        if damaged or len(kept) < len(rows):
            _replace(self.path, kept)
        self._file = open(self.path, "ab", buffering=0)

    def step(self, row: dict) -> None:
        """One training step, with at least STEP_FIELDS: loss in nats per token, mean over the global batch;
        grad_norm global and before clipping; tokens_per_second of the whole world; mfu a share of 1."""
        missing = [name for name in STEP_FIELDS if name not in row]
        assert not missing, f"the row of step {row.get('step')} lacks {missing}"
        self._write(row)

    def evaluation(self, step: int, split: str, loss: float) -> None:
        """Mean loss in nats per token over a fixed evaluation set, after ``step`` steps."""
        self._write({"step": step, "split": split, "loss": loss})

    def sync(self) -> None:
        """Bring all rows to the disk, so that a checkpoint never outlives the rows before it."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Bring everything to the disk and close the file."""
        self.sync()
        self._file.close()

    def _write(self, row: dict) -> None:
        append(self._file, _line({**row, "attempt": self.attempt}))


def append(file: io.FileIO, data: bytes) -> None:
    """Write all of data to an unbuffered file, or nothing: half a record must not stand before others.

    Raises an OSError that names the file.
    """
    start = os.fstat(file.fileno()).st_size
    try:
        if file.write(data) < len(data):  # the space ended within them
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        os.ftruncate(file.fileno(), start)
        advice = "so the run ends here; the same command continues from the last checkpoint"
        raise OSError(error.errno, f"{error.strerror}, {advice}", str(file.name)) from None


class NullSink:
    """Where ranks other than 0 write their metrics, and what stands for a TensorBoard that is off."""

    def step(self, row: dict) -> None:
        pass

    def evaluation(self, step: int, split: str, loss: float) -> None:
        pass

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass


def _line(row: dict) -> bytes:
    """A row as JSON. JSON has no NaN: such a value is null, and its name stands in the field "nonfinite"."""
    odd = {name: str(value) for name, value in row.items()
           if isinstance(value, float) and not math.isfinite(value)}
    if odd:
        row = {**row, **dict.fromkeys(odd), "nonfinite": odd}
    return (json.dumps(row, allow_nan=False) + "\n").encode()


def _parse(path: Path) -> tuple[list[dict], bool]:
    """The rows, and whether the file ends in a torn line or without a line end."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return [], False
    lines = data.split(b"\n")
    torn = bool(lines.pop())
    if torn:
        lines = data.split(b"\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or not isinstance(row["step"], int):
                raise ValueError("not a row")
        except (ValueError, KeyError):
            if number == len(lines):
                return rows, True
            raise MetricsError(f"{path}: line {number} of {len(lines)} is not a JSON object with a step; the "
                               "file was changed or damaged: mend the line, or move the file away") from None
        for name, value in row.pop("nonfinite", {}).items():
            row[name] = float(value)
        rows.append(row)
    return rows, torn


def _replace(path: Path, rows: list[dict]) -> None:
    """Write the file anew beside the old one, then rename: a kill leaves the old or the new."""
    temporary = path.with_suffix(".jsonl.tmp")
    with open(temporary, "wb") as file:
        file.writelines(_line(row) for row in rows)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
