"""A sweep's folder as runs would leave it, from a planted law: no training."""

import json
from pathlib import Path

import numpy as np
import yaml

from megnorm.scaling.cells import Status, write_status
from megnorm.scaling.sweep import plan_cells, write_cells

SIZES = {"a": (1, 48), "b": (2, 64), "c": (3, 96), "d": (4, 160)}
OFFSET = {"pre": 0.03, "hybrid_star": 0.0}


def make_sweep(folder: Path, budgets: tuple[int, ...] = (200, 400, 800), **changes) -> Path:
    """4 sizes x budgets x 2 schemes, all done, with 40 rows of metrics each; the path of the sweep file."""
    base = {
        "run_dir": "unused",
        "model": {"layers": 1, "hidden": 32, "heads": 4, "vocab_size": 256},
        "data": {"sequence_length": 64, "train": "nowhere/train", "valid": "nowhere/valid"},
        "train": {"steps": 10, "micro_batch": 1, "global_batch": 32},
        "optimizer": {"lr": 1e-3},
    }
    raw = {
        "base": "base.yaml",
        "dir": str(folder / "sweep"),
        "axes": {
            "size": {name: {"model.layers": n, "model.hidden": d} for name, (n, d) in SIZES.items()},
            "train.steps": list(budgets),
            "scheme": {name: {"model.norm": name} for name in OFFSET},
        },
        "cost": {"tflops": 0.05, "price": 0.2},
        **changes,
    }
    (folder / "base.yaml").write_text(yaml.safe_dump(base))
    (folder / "sweep.yaml").write_text(yaml.safe_dump(raw, sort_keys=False))
    sweep, planned = plan_cells(folder / "sweep.yaml", lambda config: config)
    write_cells(sweep.dir, sweep, planned)
    rng = np.random.default_rng(0)
    for cell, config in planned:
        final = 1.8 + OFFSET[cell.scheme] + 60 / cell.non_embedding**0.35 + 520 / cell.tokens**0.366
        final *= np.exp(0.002 * rng.standard_normal())
        with open(cell.path / "metrics.jsonl", "w") as file:
            for step in np.linspace(cell.steps / 40, cell.steps, 40).astype(int):
                loss = final + 3 * np.exp(-5 * step / cell.steps)
                row = {"step": int(step), "tokens": int(step) * config.tokens_per_step, "loss": float(loss)}
                file.write(json.dumps(row) + "\n")
            file.write(json.dumps({"step": cell.steps, "split": "valid", "loss": float(final)}) + "\n")
        write_status(cell.path, Status("done", 1, seconds=36.0))
    return folder / "sweep.yaml"
