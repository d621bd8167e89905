"""Repeat the small experiments on norm schemes, minutes each on two cores, on the demo's text (launch/demo.sh).

    python tools/science.py gradients    # each layer's gradient norm, in step 1 and after 100 steps
    python tools/science.py depth        # 64 layers, high learning rates, no warm-up: which schemes learn
    python tools/science.py stream       # the size of the residual stream over the depth

Every run is an ordinary ``megnorm train configs/science/NAME.yaml model.norm=...`` under runs/science; finished
ones are kept and not run again (--fresh: they are). Writes NAME.json, NAME.md and NAME.png into --output.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from rich.console import Console

from megnorm.config import load_config
from megnorm.observe.science import EXPERIMENTS, Experiment, Trial, finished
from megnorm.observe.science_plot import draw

ROOT = Path(__file__).resolve().parents[1]


def run_trial(experiment: Experiment, trial: Trial, folder: Path) -> Path:
    """Train, unless that was done before. Raises RuntimeError for a run that failed otherwise than by its loss."""
    config, run_dir = f"configs/science/{experiment.name}.yaml", folder / trial.name
    steps = load_config(ROOT / config, list(trial.overrides)).total_steps
    if not finished(run_dir, steps):
        command = [sys.executable, "-m", "megnorm", "train", config, *trial.overrides, f"run_dir={run_dir}",
                   "--resume", "none"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if not finished(run_dir, steps):
            raise RuntimeError(f"{trial.name} ended with exit code {done.returncode}:\n{done.stderr or done.stdout}")
    return run_dir


def run_all(experiment: Experiment, folder: Path, jobs: int, console: Console) -> dict[str, Path]:
    """The runs' folders by name, in the experiment's order."""
    found, count = {}, len(experiment.trials)
    with ThreadPoolExecutor(jobs) as pool, console.status(f"{experiment.name}: {count} runs") as status:
        waiting = {pool.submit(run_trial, experiment, trial, folder): trial for trial in experiment.trials}
        for future in as_completed(waiting):
            found[waiting[future].name] = future.result()
            console.print(f"{waiting[future].name} done")
            status.update(f"{experiment.name}: {len(found)} of {count} runs done")
    return {trial.name: found[trial.name] for trial in experiment.trials}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="+", choices=EXPERIMENTS)
    parser.add_argument("--jobs", type=int, default=max(1, os.cpu_count() or 1), help="runs at a time, one thread each")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs/science", help="where the runs lie")
    parser.add_argument("--output", type=Path, default=ROOT / "configs/science/results")
    parser.add_argument("--fresh", action="store_true", help="forget the runs of before")
    args = parser.parse_args()
    if args.jobs < 1:
        parser.error("--jobs must be at least 1")
    os.environ["OMP_NUM_THREADS"] = "1"
    console = Console()
    for name in args.experiments:
        experiment, folder = EXPERIMENTS[name], args.runs.resolve() / name
        if args.fresh and folder.exists():
            shutil.rmtree(folder)
        result = experiment.collect(run_all(experiment, folder, args.jobs, console))
        args.output.mkdir(parents=True, exist_ok=True)
        table = experiment.table(result)
        (args.output / f"{name}.json").write_text(json.dumps(result) + "\n")
        (args.output / f"{name}.md").write_text(table)
        draw(name, result, args.output / f"{name}.png")
        console.print(table, markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
