"""A cell of a sweep and its state. A cell's run directory is the only truth about it.

    DIR/sweep.json           what `megnorm sweep` was told, for reports
    DIR/cells/NAME/          the run directory of `megnorm train`: metrics.jsonl, checkpoints, config.yaml
        cell.yaml            its configuration          cell.json    what it is in the sweep
        status.json          written by whatever runs the cell, whole or not at all; its time is a heartbeat
        queued.json          the job of the cell, written by whoever submitted it
        log.txt              what all attempts printed  lock         held while one runs

Nothing is shared between the nodes but the file system, and only the one that runs a cell writes into it.
"""

import json
import math
import os
import re
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from megnorm.observe.metrics import read_metrics
from megnorm.plan.flops import flops_per_step
from megnorm.plan.parameters import count_parameters
from megnorm.scaling.errors import ScalingError

HEARTBEAT_SECONDS = 10.0
LOST_SECONDS = 90.0
DONE, USER_ERROR, STOPPED = 0, 2, 75  # exit codes of `megnorm train`


@dataclass(frozen=True)
class Cell:
    """One run of a sweep.

    labels: its place on each axis; parent: folder of the cell from whose end it continues, or None; trunk: it
    only serves others; first_step, steps: where it starts and ends; parameters ... seed: facts about its
    configuration; nproc, nnodes: processes a machine, and machines; retries: how often a failure is tried again.
    """

    folder: str
    labels: dict[str, str]
    parent: str | None
    trunk: bool
    first_step: int
    steps: int
    tokens: int
    parameters: int
    non_embedding: int
    active: int
    flops_per_step: int
    scheme: str
    lr: float
    seed: int
    nproc: int
    nnodes: int
    retries: int

    @property
    def name(self) -> str:
        """The cell's name within the sweep, that of its folder."""
        return Path(self.folder).name

    @property
    def path(self) -> Path:
        """The cell's folder."""
        return Path(self.folder)

    @property
    def config(self) -> Path:
        """The cell's configuration file."""
        return self.path / "cell.yaml"

    @property
    def own_flops(self) -> int:
        """What this cell computes itself, without the trunk before it."""
        return (self.steps - self.first_step) * self.flops_per_step


@dataclass(frozen=True)
class Status:
    """State: pending, running, stopped (continues), done or failed; ``lost``: running, without sign of life.

    seconds: of all attempts; exit_code and error: of the last failure; beat: time of the last sign of life.
    """

    state: str = "pending"
    attempts: int = 0
    failures: int = 0
    seconds: float = 0.0
    exit_code: int | None = None
    error: str = ""
    host: str = ""
    pid: int = 0
    job: str = ""
    beat: float = field(default=0.0, compare=False)

    @property
    def lost(self) -> bool:
        """Whether it says that it runs, but gave no sign of life for long."""
        return self.state == "running" and time.time() - self.beat > LOST_SECONDS

    def over(self, retries: int) -> bool:
        """Nothing more to do: done, or failed too often."""
        return self.state == "done" or self.state == "failed" and self.failures > retries


def read_status(folder: Path) -> Status:
    """The state of a cell; pending where nothing ran yet."""
    path = folder / "status.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return Status(**{**values, "beat": path.stat().st_mtime})
    except FileNotFoundError:
        return Status()
    except (OSError, ValueError, TypeError) as error:
        raise ScalingError(f"{path} is damaged ({error}): delete it to run the cell from its checkpoints") from None


def write_status(folder: Path, status: Status) -> Status:
    """Put the state in place, whole or not at all."""
    write_json(folder / "status.json", {k: v for k, v in asdict(status).items() if k != "beat"})
    return replace(status, beat=time.time())


def write_json(path: Path, value: Any) -> None:
    """A JSON file, written beside its place and renamed into it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def read_cell(folder: str | Path) -> Cell:
    """What `megnorm sweep` wrote about a cell. Raises ScalingError."""
    path = Path(folder) / "cell.json"
    try:
        return Cell(**{**json.loads(path.read_text(encoding="utf-8")), "folder": str(folder)})
    except (OSError, ValueError, TypeError) as error:
        raise ScalingError(f"{path} can't be read ({error}): run `megnorm sweep` on the sweep file again") from None


def read_cells(directory: str | Path) -> list[Cell]:
    """All cells of a sweep's directory, by name."""
    return [read_cell(path.parent) for path in sorted(Path(directory).glob("cells/*/cell.json"))]


def describe(folder: Path, config: Any, labels: dict[str, str], **more: Any) -> Cell:
    """A cell with the facts of its configuration (vocabulary filled in)."""
    counts = count_parameters(config)
    scheme = labels.get("scheme") or labels.get("model.norm") or config.model.norm.scheme
    return Cell(
        str(folder),
        labels,
        steps=config.total_steps,
        tokens=config.total_steps * config.tokens_per_step,
        parameters=counts["total"],
        non_embedding=counts["non_embedding"],
        active=counts["active"],
        flops_per_step=flops_per_step(config),
        scheme=scheme,
        lr=config.optimizer.lr,
        seed=config.seed,
        **more,
    )


def progress(cell: Cell) -> tuple[int, float]:
    """Steps made, and the loss: of the last evaluation where it is of the last step, else the mean over the
    last tenth of training; NaN before a step."""
    rows = read_metrics(cell.path)
    steps = [row for row in rows if "split" not in row]
    if not steps:
        return cell.first_step, math.nan
    last = steps[-1]
    valid = [row for row in rows if row.get("split") == "valid" and row["step"] == last["step"]]
    if valid:
        return last["step"], valid[-1]["loss"]
    if not math.isfinite(last["loss"]):
        return last["step"], last["loss"]
    late = [row["loss"] for row in steps if row["step"] > last["step"] - max(1, last["step"] // 10)]
    return last["step"], sum(late) / len(late)


def result_rows(directory: str | Path, trunks: bool = False) -> list[dict[str, Any]]:
    """A row for each cell (with the trunks only when asked for): the columns that `megnorm fit` reads, and cost.

    flops: of the training that gave the loss, its trunk included; own_flops: what the cell computed itself.
    """
    rows = []
    for cell in read_cells(directory):
        if cell.trunk and not trunks:
            continue
        status = read_status(cell.path)
        step, loss = progress(cell)
        diverged = step > cell.first_step and not math.isfinite(loss)
        rows.append(
            {
                "name": cell.name,
                **{f"label.{axis}": label for axis, label in cell.labels.items()},
                "scheme": cell.scheme,
                "parameters": cell.parameters,
                "non_embedding": cell.non_embedding,
                "active": cell.active,
                "tokens": cell.tokens,
                "flops": cell.steps * cell.flops_per_step,
                "own_flops": max(0, step - cell.first_step) * cell.flops_per_step,
                "lr": cell.lr,
                "seed": cell.seed,
                "loss": loss if status.state == "done" or diverged else None,
                "state": status.state,
                "step": step,
                "device_hours": status.seconds * cell.nproc * cell.nnodes / 3600,
                "error": status.error,
            }
        )
    return rows


def last_words(log: Path) -> str:
    """The message with which a run ended: its last line from megnorm, else its last line."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - 20_000))
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    except FileNotFoundError:
        return ""
    ours = [line for line in lines if re.match(r"megnorm: ", line)]
    return (ours or lines or [""])[-1][:500]


def has_checkpoint(folder: Path) -> bool:
    """Whether the cell has saved anything itself."""
    return any((folder / "checkpoints").glob("*step-*"))
