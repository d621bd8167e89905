"""Sweeps on a Slurm cluster: generated job arrays, submitted once, requeued until their cells are over."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

from megnorm.scaling.cells import Cell, read_status, write_json
from megnorm.scaling.errors import ScalingError
from megnorm.scaling.sweep import SweepFile

# The cell's launcher on each node; the node's number is known only inside the step. `exec` lets the launcher
# itself get the signals; --kill-on-bad-exit=0, since launchers that still save must not be killed.
SCRIPT = """\
#!/usr/bin/env bash
# Written by `megnorm sweep`: task n of the array runs the cell in line n (from 0) of {list}.
# {notice} s before the time limit Slurm sends SIGUSR1 to the launchers: they save and end with 75, and the
# task goes back into the queue, to continue in the same run directory, as a cell that failed with tries left.
#SBATCH --job-name={name}
#SBATCH --array=0-{last}%{parallel}
#SBATCH --nodes={nnodes}
#SBATCH --ntasks-per-node=1
#SBATCH --time={time}
#SBATCH --signal=USR1@{notice}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={folder}/%A_%a.log
{options}set -euo pipefail
cd {cwd}
{setup}CELL=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {list})
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
PORT=$((20000 + SLURM_JOB_ID % 20000))
export PYTHON={python} HEAD PORT NPROC={nproc}
export PYTHONPATH={cwd}${{PYTHONPATH:+:$PYTHONPATH}}

code=0
"$PYTHON" -m megnorm sweep --job "$SLURM_JOB_ID" run "$CELL" -- srun --kill-on-bad-exit=0 bash -c '
    exec "$PYTHON" -m megnorm train --nproc "$NPROC" --nnodes "$SLURM_NNODES" \\
        --node-rank "$SLURM_NODEID" --rdzv-endpoint "$HEAD:$PORT" "$@"
' train || code=$?

if [ "$code" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
exit "$code"
"""


def array_script(cells: list[Cell], sweep: SweepFile, level: int, parallel: int) -> tuple[str, str]:
    """The script and the list of cells of one array; cells of a level need only those of lower ones."""
    folder = Path(sweep.dir).resolve() / "slurm"
    text = SCRIPT.format(
        list=shlex.quote(str(folder / f"level-{level}.txt")),
        folder=folder,
        name=re.sub(r"\W+", "-", Path(sweep.dir).name),
        last=len(cells) - 1,
        parallel=parallel,
        nnodes=sweep.nnodes,
        nproc=sweep.nproc,
        time=sweep.slurm.time,
        notice=sweep.slurm.notice,
        cwd=shlex.quote(str(Path.cwd())),
        python=shlex.quote(sys.executable),
        options="".join(f"#SBATCH {option}\n" for option in sweep.slurm.options),
        setup="".join(f"{line}\n" for line in sweep.slurm.setup),
    )
    return text, "".join(f"{cell.path.resolve()}\n" for cell in cells)


def levels(cells: list[Cell]) -> list[list[Cell]]:
    """Cells by how many others stand before them."""
    by_folder = {cell.folder: cell for cell in cells}

    def depth(cell: Cell) -> int:
        return 0 if cell.parent not in by_folder else 1 + depth(by_folder[cell.parent])

    out: dict[int, list[Cell]] = {}
    for cell in cells:
        out.setdefault(depth(cell), []).append(cell)
    return [out[level] for level in sorted(out)]


def submit(cells: list[Cell], sweep: SweepFile, parallel: int) -> list[str]:
    """Write and submit arrays for the cells that are neither over nor in the queue; returns what was done."""
    queued = in_queue()
    todo = [cell for cell in cells if not read_status(cell.path).over(cell.retries) and not _is_queued(cell, queued)]
    folder = Path(sweep.dir) / "slurm"
    folder.mkdir(parents=True, exist_ok=True)
    said, before = [], None
    for level, group in enumerate(levels(todo)):
        script, names = array_script(group, sweep, level, parallel)
        (folder / f"level-{level}.txt").write_text(names, encoding="utf-8")
        (folder / f"level-{level}.sbatch").write_text(script, encoding="utf-8")
        after = [f"--dependency=afterany:{before}"] if before else []
        before = _call(["sbatch", "--parsable", *after, str(folder / f"level-{level}.sbatch")]).strip().split(";")[0]
        for task, cell in enumerate(group):
            write_json(cell.path / "queued.json", {"job": before, "task": task})
        said.append(f"job {before}: {len(group)} cells, {folder}/level-{level}.sbatch")
    left = len(cells) - len(todo)
    return said + ([f"{left} cells are over or already in the queue"] if left else [])


def in_queue() -> set[str]:
    """The user's array tasks that Slurm knows, as JOB_TASK."""
    return set(_call(["squeue", "--me", "-h", "-r", "-o", "%F_%K"]).split())


def _is_queued(cell: Cell, queued: set[str]) -> bool:
    try:
        place = json.loads((cell.path / "queued.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return False
    return f"{place.get('job')}_{place.get('task')}" in queued


def _call(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ScalingError(
            f"--backend slurm needs `{command[0]}`, which isn't here: run it on a login node of the "
            "cluster, or take --backend local or print"
        ) from None
    if done.returncode:
        raise ScalingError(f"{' '.join(command)} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
