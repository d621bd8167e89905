"""A sweep file as cells: a base configuration, axes that make a grid, further cells, and checks of each."""

import difflib
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator

from megnorm.config import Config, ConfigError, dump_config, load_config, parse_config
from megnorm.config.base import Section
from megnorm.config.config import apply_override, read_yaml
from megnorm.plan.layout import check_layout, make_layout
from megnorm.plan.parameters import count_parameters
from megnorm.plan.schedule import check_schedule
from megnorm.scaling.cells import Cell, describe, read_status, write_json
from megnorm.scaling.errors import ScalingError
from megnorm.scaling.trunk import with_trunks

Complete = Callable[[Config], Config]
# Keys that are no keys of a configuration: what they set follows from the rest of the cell.
DERIVED = ("tokens_per_parameter", "warmup_share", "decay_share")
# Changed between two calls, these don't make another run.
HARMLESS = ("observe.", "checkpoint.", "parallel.", "run_dir")


class Cost(Section):
    """For estimates. tflops: what one device sustains on such models; start_seconds: of a run before its
    first step; price: of a device for an hour, in ``currency``."""

    tflops: float | None = Field(None, gt=0)
    start_seconds: float = Field(0.0, ge=0)
    price: float | None = Field(None, ge=0)
    currency: str = "$"


class Slurm(Section):
    """time: limit of a job, as 24:00:00; notice: seconds before it at which runs save and end; options:
    further lines for sbatch, as ``--partition=gpu``; setup: shell lines to run before training, such as
    ``export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0`` where nodes have several networks."""

    time: str = "24:00:00"
    notice: int = Field(300, gt=0)
    options: list[str] = []
    setup: list[str] = []


class SweepFile(Section):
    """A sweep.

    base: configuration file, relative to this one. dir: folder of the sweep. set: keys for all cells.
    axes: the grid: by name, either a list of values (the name is then a key of the configuration), or labels
    with the keys that each sets. cells: further cells, each a mapping of keys, ``name`` among them.
    share_trunk: cells that differ only in their duration share the run up to the decay (schedule.kind wsd).
    retries: how often a failed cell is tried again. nproc, nnodes: processes a machine, machines a cell.
    """

    base: str
    dir: str
    set: dict[str, Any] = {}
    axes: dict[str, list[Any] | dict[str, Any]] = {}
    cells: list[dict[str, Any]] = []
    share_trunk: bool = False
    retries: int = Field(2, ge=0)
    nproc: int = Field(1, gt=0)
    nnodes: int = Field(1, gt=0)
    cost: Cost = Cost()
    slurm: Slurm = Slurm()

    @field_validator("axes", mode="before")
    @classmethod
    def labels_are_text(cls, axes: Any) -> Any:
        """A label that YAML reads as a number stays a label."""
        if not isinstance(axes, dict):
            return axes
        return {axis: {_label(name): keys for name, keys in values.items()} if isinstance(values, dict) else values
                for axis, values in axes.items()}


def _label(name: Any) -> Any:
    return f"{name:g}" if isinstance(name, (int, float)) else name


def read_sweep(path: str | Path) -> SweepFile:
    """Read a sweep file. Raises ScalingError with one message."""
    path = Path(path)
    try:
        raw = read_yaml(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")], n=1)
        raise ScalingError(
            f"no sweep file {path}" + (f"; did you mean {path.parent / near[0]}?" if near else "")
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ScalingError(f"cannot read {path}: {error}") from None
    try:
        return SweepFile.model_validate(raw, strict=None)
    except ValidationError as error:
        raise ScalingError(f"{path}: {_explain(error.errors()[0])}") from None


def plan_cells(path: str | Path, complete: Complete) -> tuple[SweepFile, list[tuple[Cell, Config]]]:
    """All cells of a sweep file, checked, those that others continue from first.

    complete: fills the vocabulary in, or raises a ValueError of megnorm. Raises ScalingError naming the cell.
    """
    sweep = read_sweep(path)
    base = Path(path).parent / sweep.base
    load_config(base)  # its own errors, before those of cells
    raw = json.dumps(read_yaml(base.read_text(encoding="utf-8"), str(base)))
    planned, names = [], set()
    for name, labels, values in _grid(sweep, str(path)):
        if name in names:
            raise ScalingError(f"{path}: two cells are called {name}: give labels that differ")
        names.add(name)
        try:
            folder = Path(sweep.dir) / "cells" / name
            config = cell_config(json.loads(raw), values, str(folder), complete)
            check_cell(complete(config), sweep)
        except (ConfigError, ScalingError) as error:
            raise ScalingError(f"{path}: cell {name}: {error}") from None
        planned.append(
            (
                describe(
                    folder,
                    complete(config),
                    labels,
                    parent=None,
                    trunk=False,
                    first_step=0,
                    **_machine(sweep),
                ),
                config,
            )
        )
    if sweep.share_trunk:
        planned = with_trunks(planned, str(path))
    return sweep, planned


def cell_config(raw: dict, values: dict[str, Any], run_dir: str, complete: Complete) -> Config:
    """The base with the cell's keys set; derived ones become steps and tokens."""
    derived = {key: values[key] for key in DERIVED if key in values}
    for key, value in {**values, "run_dir": run_dir}.items():
        if key in derived:
            continue
        if key in ("train.steps", "train.tokens") and isinstance(raw.get("train"), dict):
            raw["train"].pop("tokens" if key == "train.steps" else "steps", None)
        apply_override(raw, f"{key}={json.dumps(value)}")
    for key, value in derived.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ScalingError(f"{key}={value!r} must be a number above 0")
    shares = {part: derived[f"{part}_share"] for part in ("warmup", "decay") if f"{part}_share" in derived}
    raw = _without_shares(raw, shares)
    if "tokens_per_parameter" in derived:
        raw["train"].pop("steps", None)
        raw["train"]["tokens"] = 1
        size = count_parameters(complete(parse_config(raw)))["total"]
        raw["train"]["tokens"] = round(derived["tokens_per_parameter"] * size)
    if shares:
        steps = parse_config(raw).total_steps
        raw["schedule"].update({f"{part}_steps": max(1, round(share * steps)) for part, share in shares.items()})
    return parse_config(raw)


def check_cell(config: Config, sweep: SweepFile) -> None:
    """Raise ConfigError when the cell can't be run on its processes, or has no sensible schedule."""
    check_layout(config, make_layout(config, sweep.nproc * sweep.nnodes))
    check_schedule(config)


def write_cells(directory: str | Path, sweep: SweepFile, planned: list[tuple[Cell, Config]]) -> None:
    """Make the folders. A cell that has run is left as it is, and refused when it is another now."""
    for cell, config in planned:
        if cell.config.exists() and read_status(cell.path).state != "pending":
            changes = changed_keys(load_config(cell.config), config)
            if changes:
                raise ScalingError(
                    f"cell {cell.name} has run with other values:\n  "
                    + "\n  ".join(changes)
                    + f"\ntake another `dir`, or move {cell.folder} away"
                )
    for cell, config in planned:
        cell.path.mkdir(parents=True, exist_ok=True)
        cell.config.write_text(dump_config(config), encoding="utf-8")
        write_json(cell.path / "cell.json", {k: v for k, v in cell.__dict__.items() if k != "folder"})
    write_json(Path(directory) / "sweep.json", sweep.model_dump(mode="json"))


def changed_keys(old: Config, new: Config) -> list[str]:
    """Keys whose change makes another run, as ``key: old -> new``."""
    before, after = (_flat(config.model_dump(mode="json")) for config in (old, new))
    return [
        f"{key}: {before.get(key)} -> {after.get(key)}"
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key) and not key.startswith(HARMLESS)
    ]


def _flat(values: dict, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {prefix + key: value}
    return flat


def _machine(sweep: SweepFile) -> dict[str, int]:
    return {"nproc": sweep.nproc, "nnodes": sweep.nnodes, "retries": sweep.retries}


def _grid(sweep: SweepFile, origin: str) -> list[tuple[str, dict[str, str], dict[str, Any]]]:
    """Name, labels and keys of each cell."""
    if not sweep.axes and not sweep.cells:
        raise ScalingError(f"{origin}: neither axes nor cells: there is nothing to sweep")
    axes = [
        [(axis, label, keys) for label, keys in _points(axis, values, origin)] for axis, values in sweep.axes.items()
    ]
    found = []
    for point in itertools.product(*axes) if axes else ():
        labels = {axis: label for axis, label, _ in point}
        values = {key: value for _, _, keys in point for key, value in keys.items()}
        found.append(("_".join(labels.values()), labels, {**sweep.set, **values}))
    for number, values in enumerate(sweep.cells, start=1):
        name = _label(values.get("name", f"cell{number}"))
        found.append((name, {"cell": name}, {**sweep.set, **{k: v for k, v in values.items() if k != "name"}}))
    return found


def _points(axis: str, values: list | dict, origin: str) -> list[tuple[str, dict[str, Any]]]:
    """Labels of an axis, each with the keys that it sets."""
    if not values:
        raise ScalingError(f"{origin}: the axis {axis} has no values")
    if isinstance(values, list):
        if bad := [value for value in values if isinstance(value, dict | list)]:
            raise ScalingError(
                f"{origin}: axis {axis}: {bad[0]!r} needs a label: write the axis as LABEL: {{key: value}}"
            )
        return [(_label(value), {axis: value}) for value in values]
    return [(_label(label), keys if isinstance(keys, dict) else {axis: keys}) for label, keys in values.items()]


def _label(value: Any) -> str:
    """A value as a part of a folder's name."""
    text = str(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and float(f"{value:g}") == value:
        text = f"{value:g}".replace("e+0", "e").replace("e+", "e").replace("e-0", "e-")
    return re.sub(r"[^A-Za-z0-9_.+-]+", "-", text).strip(".") or "value"


def _without_shares(raw: dict, shares: dict[str, float]) -> dict:
    """The configuration with whatever a share will replace set to one step."""
    schedule = raw.setdefault("schedule", {}) if shares else {}
    for part in shares:
        schedule.pop(f"{part}_tokens", None)
        schedule[f"{part}_steps"] = 1
    return raw


def _explain(item: dict) -> str:
    where = ".".join(map(str, item["loc"]))
    if item["type"] == "extra_forbidden":
        section: type[Section] = SweepFile
        for part in item["loc"][:-1]:
            section = section.model_fields[part].annotation
        near = difflib.get_close_matches(str(item["loc"][-1]), list(section.model_fields), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(section.model_fields)}"
        return f"unknown key {where!r}; {hint}"
    if item["type"] == "missing":
        return f"{where!r} is missing"
    return f"{where}={item['input']!r}: {item['msg'][0].lower()}{item['msg'][1:]}" if where else "not a mapping of keys"
