"""The shell scripts parse, and CI runs what the README tells people to run."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted([*(ROOT / "launch").glob("*.sh"), *(ROOT / "launch").glob("*.sbatch"), ROOT / ".ci" / "run"])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_parses(script: Path) -> None:
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_stops_at_the_first_error(script: Path) -> None:
    assert "\nset -euo pipefail\n" in script.read_text()


def test_ci_runs_the_test_command() -> None:
    assert "\nbash launch/test.sh\n" in (ROOT / ".ci" / "run").read_text()
