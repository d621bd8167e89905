"""What the commands ``megnorm fit``, ``report`` and ``sweep`` do once their arguments are read."""

import json
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from megnorm.scaling.cells import STOPPED, Cell, read_cells, read_status
from megnorm.scaling.errors import ScalingError
from megnorm.scaling.fit import analyse
from megnorm.scaling.results import read_results
from megnorm.scaling.run import Runner, local_launcher, run_all, run_one
from megnorm.scaling.slurm import array_script, levels, submit
from megnorm.scaling.sweep import Complete, SweepFile, plan_cells, read_sweep, write_cells
from megnorm.scaling.tables import plan_table, status_table
from megnorm.scaling.words import lines

BACKENDS = ("local", "slurm", "print")
REFRESH_SECONDS = 2.0


def fit_command(path: str, form: str, budgets: list[float] | None, draws: int, output: str | None) -> list[str]:
    """Lines to print; the whole analysis goes to ``output`` as JSON."""
    results, notes = read_results(path)
    analysis = analyse(results, form, budgets, draws, notes)
    if output is not None:
        Path(output).write_text(json.dumps(analysis, indent=1), encoding="utf-8")
    return lines(analysis)


def sweep_command(
    words: list[str],
    backend: str,
    parallel: int,
    dry_run: bool,
    job: str,
    complete: Complete,
    environ: Mapping[str, str],
    cores: int,
) -> int:
    """``SWEEP.yaml``, ``status SWEEP.yaml`` or ``run CELL [LAUNCHER ...]``; returns the exit code."""
    if words[0] == "run" and len(words) > 1:
        return run_one(words[1], words[2:], job, environ)
    if words[0] == "status" and len(words) == 2:
        return show_status(words[1])
    if len(words) != 1:
        raise ScalingError(
            f"megnorm sweep {' '.join(words)}: say `megnorm sweep SWEEP.yaml`, `megnorm sweep status "
            "SWEEP.yaml` or `megnorm sweep run CELL`"
        )
    if backend not in BACKENDS:
        raise ScalingError(f"--backend {backend}: choose one of {', '.join(BACKENDS)}")
    if parallel < 1:
        raise ScalingError(f"--max-parallel {parallel}: at least one cell must run at a time")
    sweep, planned = plan_cells(words[0], complete)
    cells = [cell for cell, _ in planned]
    if backend == "local" and sweep.nnodes > 1:
        raise ScalingError(f"nnodes={sweep.nnodes} can't be run with --backend local: take slurm, or nnodes: 1")
    if dry_run:
        _print(plan_table(cells, sweep))
        print("\n".join(scripts(cells, sweep, backend, parallel)))
        return 0
    write_cells(sweep.dir, sweep, planned)
    if backend == "print":
        print("\n".join(scripts(cells, sweep, backend, parallel)))
        return 0
    if backend == "slurm":
        print("\n".join(submit(cells, sweep, parallel)))
        return 0
    return run_here(cells, parallel, environ, cores)


def scripts(cells: list[Cell], sweep: SweepFile, backend: str, parallel: int) -> list[str]:
    """What would be run, word for word."""
    if backend == "slurm":
        return ["".join(array_script(group, sweep, level, parallel)[0]) for level, group in enumerate(levels(cells))]
    if backend == "print":
        return [f"megnorm sweep run {cell.folder}" for cell in cells]
    return [" ".join([*local_launcher(cell), str(cell.config), "--resume", cell.parent or "auto"]) for cell in cells]


def run_here(cells: list[Cell], parallel: int, environ: Mapping[str, str], cores: int) -> int:
    """Run all cells on this machine, its cores shared out among those that run at a time."""
    share = {"OMP_NUM_THREADS": str(max(1, cores // parallel // cells[0].nproc))} if parallel > 1 else {}
    began, console = time.time(), Console()
    runner = Runner(
        {**share, **environ},
        lambda text: console.print(
            f"[{_clock(time.time() - began)}] {text}", markup=False, highlight=False, soft_wrap=True
        ),
    )
    runner.install()
    done = run_all(cells, runner, parallel)
    _print(status_table(cells))
    for cell in cells:
        status = read_status(cell.path)
        if status.state == "failed" and status.failures > cell.retries:
            print(
                f"{cell.name} failed {status.failures} times and is not tried again: raise `retries` in the "
                f"sweep file once the reason is gone ({cell.path / 'log.txt'})"
            )
    return 0 if done else STOPPED if runner.stopping else 1


def show_status(path: str) -> int:
    """The table of a sweep (its file or its folder); on a terminal it follows the runs until none is left."""
    directory = Path(path) if Path(path).is_dir() else Path(read_sweep(path).dir)
    cells = read_cells(directory)
    if not cells:
        raise ScalingError(f"{directory} holds no cells yet: run `megnorm sweep {path}`")
    console = Console()
    if not console.is_terminal:
        _print(status_table(cells))
        return 0
    with Live(status_table(cells), console=console, auto_refresh=False) as live:
        while any(read_status(cell.path).state == "running" for cell in cells):
            time.sleep(REFRESH_SECONDS)
            live.update(status_table(cells), refresh=True)
    return 0


def _print(table: Table) -> None:
    """At full width where the output is no terminal."""
    console = Console()
    Console(width=None if console.is_terminal else 160).print(table)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60:3d}:{int(seconds) % 60:02d}"
