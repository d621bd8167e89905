"""The scripts in launch/, with stand-ins for Python, Slurm and the package index: no install, no network."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)
    return path


def run(command: list[str], cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    ours = ("MEGNORM_VENV", "MEGNORM_INDEX_URL", "MEGNORM_ALLOW_CUDA", "PYTHON", "NPROC", "PORT")
    env = {name: value for name, value in os.environ.items() if name not in ours}
    return subprocess.run(
        command, cwd=cwd, env={**env, **environ}, capture_output=True, text=True, timeout=60
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A repository with nothing installed."""
    shutil.copytree(ROOT / "launch", tmp_path / "repo" / "launch")
    shutil.copy(ROOT / "setup.py", tmp_path / "repo")
    return tmp_path / "repo"


def python_stand_in(folder: Path, *, version: str = "3.12.1", pip: str = "") -> Path:
    """An interpreter that makes a virtual environment of itself, and whose pip runs the given lines."""
    return script(
        folder / "python",
        f"""
log() {{ echo "$*" >>"{folder}/calls"; }}
case "$*" in
--version) echo "Python {version}" ;;
"-c import sys; print"*) echo "{version}" ;;
-c*) [[ "{version}" != 3.9.* ]] ;;
"-m venv"*) mkdir -p "${{!#}}/bin" && cp "$0" "${{!#}}/bin/python" ;;
"-m pip --version") echo "pip 99 from $(dirname "$0")/../lib" ;;
"-m pip"*) log "$@"; {pip or ":"} ;;
esac""",
    )


def test_install_once_then_nothing(copy: Path, tmp_path: Path) -> None:
    python = python_stand_in(tmp_path / "bin")
    first = run(["bash", "launch/install.sh"], copy, PYTHON=str(python))
    assert first.returncode == 0, first.stderr
    calls = (tmp_path / "bin" / "calls").read_text()
    assert "-e " in calls and "[test,plot]" in calls and "setuptools" in calls.split("\n")[0]
    assert "source .venv/bin/activate" in first.stdout
    again = run(["bash", "launch/install.sh"], copy, PYTHON=str(python))
    assert (again.returncode, again.stdout) == (0, "")
    assert (tmp_path / "bin" / "calls").read_text() == calls
    more = run(["bash", "launch/install.sh", "hf"], copy)
    assert more.returncode == 0 and "[test,plot,hf]" in (tmp_path / "bin" / "calls").read_text()
    (copy / "setup.py").write_text("changed")
    assert "megnorm[test,plot,hf" in run(["bash", "launch/install.sh"], copy).stdout


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="needs a machine without a GPU")
def test_without_a_cpu_build_it_stops_before_cuda(copy: Path, tmp_path: Path) -> None:
    python = python_stand_in(tmp_path / "bin", pip='[[ "$*" != *+cpu* ]]')
    path = f"{script(tmp_path / 'none' / 'nvidia-smi', 'exit 1').parent}:{os.environ['PATH']}"
    done = run(["bash", "launch/install.sh"], copy, PYTHON=str(python), PATH=path)
    calls = (tmp_path / "bin" / "calls").read_text()
    assert done.returncode == 2 and "MEGNORM_ALLOW_CUDA=1" in done.stderr
    assert "+cpu" in calls and "--timeout 15" in calls and "-e " not in calls
    site = run(
        ["bash", "launch/install.sh"], copy, PYTHON=str(python), PATH=path, MEGNORM_INDEX_URL="https://a.b"
    )
    assert site.returncode == 2 and "https://a.b" in site.stderr
    calls = (tmp_path / "bin" / "calls").read_text()[len(calls) :]
    assert "--index-url https://a.b" in calls and "--extra-index-url" not in calls
    allowed = run(["bash", "launch/install.sh"], copy, PYTHON=str(python), PATH=path, MEGNORM_ALLOW_CUDA="1")
    assert allowed.returncode == 0, allowed.stderr


def test_an_old_python_is_refused(copy: Path, tmp_path: Path) -> None:
    python = python_stand_in(tmp_path / "bin", version="3.9.18")
    done = run(["bash", "launch/install.sh"], copy, PYTHON=str(python))
    assert done.returncode == 2 and "3.10 or newer" in done.stderr and not (copy / ".venv").exists()


def test_a_python_without_venv_is_explained(copy: Path, tmp_path: Path) -> None:
    python = script(tmp_path / "python", 'case "$*" in "-m venv"*) echo no ensurepip; exit 1 ;; esac')
    done = run(["bash", "launch/install.sh"], copy, PYTHON=str(python))
    assert done.returncode == 2 and "python3-venv" in done.stderr and "no ensurepip" in done.stderr


def test_a_failed_step_shows_the_log_and_is_repeated(copy: Path, tmp_path: Path) -> None:
    python = python_stand_in(tmp_path / "bin", pip='[[ "$*" != *deepspeed* ]] || { echo no route; exit 1; }')
    done = run(["bash", "launch/install.sh"], copy, PYTHON=str(python))
    assert done.returncode == 1 and "no route" in done.stderr
    assert run(["bash", "launch/install.sh"], copy, PYTHON=str(python)).returncode == 1


def test_an_environment_of_the_user_is_only_looked_at(copy: Path, tmp_path: Path) -> None:
    done = run(["bash", "launch/install.sh"], copy, MEGNORM_VENV=sys.prefix)
    assert done.returncode == 0 and not (copy / ".venv").exists()
    assert run(["bash", "launch/install.sh"], copy, MEGNORM_VENV=str(tmp_path)).returncode == 2


def slurm(folder: Path, code: int) -> dict[str, str]:
    """Stand-ins: two nodes, of which srun runs the second; the launcher notes its arguments, gives `code`."""
    script(folder / "srun", 'shift; SLURM_NODEID=1 "$@"')
    script(
        folder / "scontrol", f'[ "$1" = show ] && printf "n7\\nn8\\n" || echo "$*" >>"{folder}/scontrol.log"'
    )
    script(folder / "venv" / "bin" / "python", f'printf "%s|" "$@" >"{folder}/args"; exit {code}')
    return {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "MEGNORM_VENV": str(folder / "venv"),
        "SLURM_JOB_NODELIST": "n[7-8]",
        "SLURM_JOB_ID": "123",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
    }


@pytest.mark.parametrize(
    ("code", "ends", "requeued"), [(0, 0, False), (75, 0, True), (1, 1, False), (2, 2, False)]
)
def test_slurm_starts_one_launcher_per_node_and_requeues(
    tmp_path: Path, code: int, ends: int, requeued: bool
) -> None:
    environ = slurm(tmp_path, code)
    done = run(["bash", str(ROOT / "launch" / "slurm.sbatch"), "c.yaml", "a=b c"], tmp_path, **environ)
    assert done.returncode == ends, done.stderr
    args = "-m|megnorm|train|c.yaml|a=b c|--nproc|8|--nnodes|2|--node-rank|1|--rdzv-endpoint|n7:20123|"
    assert (tmp_path / "args").read_text() == args
    log = tmp_path / "scontrol.log"
    assert (log.read_text() == "requeue 123\n") if requeued else not log.exists()


def test_torchrun_gets_the_launchers_settings(tmp_path: Path) -> None:
    script(
        tmp_path / "bin" / "python",
        f'case "$*" in *print-env*) echo "export OMP_NUM_THREADS=5" ;; '
        f'*) echo "$OMP_NUM_THREADS $*" >"{tmp_path}/args" ;; esac',
    )
    environ = {
        "MEGNORM_VENV": str(tmp_path),
        "NNODES": "2",
        "NODE_RANK": "1",
        "MASTER_ADDR": "n7",
        "NPROC": "4",
    }
    done = run(["bash", str(ROOT / "launch" / "torchrun.sh"), "c.yaml"], tmp_path, **environ)
    assert done.returncode == 0, done.stderr
    args = (tmp_path / "args").read_text()
    assert args.startswith(
        "5 -m torch.distributed.run --nnodes 2 --node-rank 1 --nproc-per-node 4 --master-addr n7"
    )
    assert args.endswith("-m megnorm train c.yaml\n")
    assert run(["bash", str(ROOT / "launch" / "torchrun.sh")], tmp_path, **environ).returncode == 2
