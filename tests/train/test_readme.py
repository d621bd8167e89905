"""The README's commands work as they stand, in a copy of the repository; trainings are shortened by overrides."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHORT = "train.steps=6 schedule.warmup_steps=2 train.eval_every=3 train.eval_samples=8 checkpoint.every=3"


def commands(heading: str) -> list[str]:
    """The commands of the bash blocks under a heading of the README, continuation lines joined."""
    section = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", README, re.S | re.M).group(1)
    blocks = re.findall(r"```bash\n(.*?)```", section, re.S)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line.split("  #")[0].strip() for line in lines if line.strip()]


README = (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """The tracked files as they are now."""
    folder = tmp_path_factory.mktemp("clone")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in listed.decode().split("\0"):
        if name and (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def run(command: str, folder: Path, timeout: float = 280) -> str:
    """Run a command as a reader would, with this interpreter's environment active."""
    environment = Path(sys.executable).parent
    variables = {**os.environ, "PATH": f"{environment}:{os.environ['PATH']}", "PYTHONPATH": str(folder),
                 "MEGNORM_VENV": str(environment.parent)}
    done = subprocess.run(["bash", "-c", command], cwd=folder, env=variables, stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def demo(clone):
    """What the demo prints; its data stay in the clone."""
    return run(f"{commands('Two commands')[0]} {SHORT}", clone)


def test_demo(clone, demo):
    assert commands("Two commands") == ["bash launch/demo.sh", "bash launch/test.sh"]
    report = json.loads((clone / "runs/demo/report.json").read_text())
    assert (clone / "runs/demo/loss.png").stat().st_size > 10_000
    assert "valid loss" in demo and "bigram" in demo and report


def test_own_text(clone):
    sources = sorted(Path(os.__file__).parent.glob("*.py"))[:120]
    with open(clone / "corpus.jsonl", "w") as corpus:
        corpus.writelines(json.dumps({"text": path.read_text()}) + "\n" for path in sources)
    tokenizer, preprocess, train, sample = commands("Train on your own text")
    run(tokenizer, clone)
    run(preprocess, clone)
    assert "done: 6 steps" in run(f"{train} {SHORT}", clone)
    assert run(sample, clone).startswith("Once upon a time")


def test_schemes(clone):
    listed, shown = (run(command, clone) for command in commands("Choose where the norms stand"))
    assert "hybrid_star" in listed and "layers 1-15" in shown


def test_parity(clone, demo):
    parity, *launches = commands("Choose a layout")
    assert run(parity, clone).count("agrees") == 4
    assert [command.split()[0] for command in launches] == ["megnorm", "NNODES=4", "sbatch"]


def test_plan_and_sweep(clone, demo):
    """Sweeps that run, fits and reports: test_sweep.py."""
    plan, ladder, costs, *rest = commands("Plan, sweep, fit")
    assert "1,276,943,360" in run(plan, clone)
    assert "6.3b" in run(ladder, clone)
    assert "60 cells" in run(costs, clone)
    assert [command.split()[1] for command in rest] == ["sweep", "fit", "report"]
