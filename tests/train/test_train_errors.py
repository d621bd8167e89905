"""What a user can get wrong: one message, exit code 2, no traceback, at once and before torch is imported."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from small_run import VOCAB, raw_config, run, write_config

from megnorm.data.indexed import IndexedWriter, best_dtype

# A torch that can't be imported: the checks must do without.
NO_TORCH = 'raise SystemExit("torch was imported")\n'
NONE = "{attention: {in_norm: none}}"

MISTAKES = {
    "unknown key": (["train.step=5"], "unknown key 'train.step'; did you mean 'steps'?"),
    "unknown section": (["modle.layers=2"], "unknown key 'modle'; did you mean 'model'?"),
    "wrong type": (["train.steps=five"], "train.steps='five': input should be a valid integer"),
    "fraction for a count": (["train.steps=5.5"], "train.steps=5.5: input should be a valid integer"),
    "not a number": (["optimizer.lr=.nan"], "optimizer.lr=nan: input should be a finite number"),
    "override without value": (["train.steps"], "override 'train.steps' is not of the form key.sub=value"),
    "override into a value": (["model.layers.x=2"], "'layers' is the value 2, not a section"),
    "override not YAML": (["train.steps=["], "override 'train.steps=[': line 1: not valid YAML"),
    "unknown scheme": (["model.norm=hybird"], "model.norm: unknown scheme 'hybird'; did you mean 'hybrid'?"),
    "bad layer selector": ([f"model.norm.overrides={{frist: {NONE}}}"], "frist"),
    "layer beyond the depth": ([f"model.norm.overrides={{7: {NONE}}}"], "7"),
    "unknown slot": (["model.norm.overrides={0: {attention: {inn_norm: none}}}"], "inn_norm"),
    "world and layout": (
        ["parallel.tp=3"],
        "a world of 2 processes doesn't fit parallel.tp=3",
    ),
    "world and dp": (["parallel.dp=3"], "parallel.dp=3 doesn't fit: 2 processes"),
    "heads and tp": (
        ["parallel.tp=2", "model.heads=5", "model.kv_heads=5", "model.head_size=8"],
        "model.heads=5 is not divisible by parallel.tp=2; tp could be one of [1, 5]",
    ),
    "kv heads and tp": (
        ["parallel.tp=2", "model.heads=6", "model.kv_heads=3", "model.head_size=8"],
        "model.kv_heads=3",
    ),
    "ZeRO 2 and pipeline": (
        ["parallel.pp=2", "parallel.zero_stage=2"],
        "parallel.zero_stage=2 doesn't go with parallel.pp=2",
    ),
    "ZeRO 3 and pipeline": (
        ["parallel.pp=2", "parallel.zero_stage=3"],
        "parallel.zero_stage=3 doesn't go with parallel.pp=2",
    ),
    "more stages than layers": (
        ["parallel.pp=2", "model.layers=1"],
        "parallel.pp=2 is more than model.layers=1",
    ),
    "global batch": (
        ["train.global_batch=7"],
        "train.global_batch=7 is not divisible by micro_batch=1 x dp=2 = 2; the nearest that is: 8",
    ),
    "warm-up": (["schedule.warmup_steps=21"], "warm-up 21 steps are longer than the run of 20 steps"),
    "missing dataset": (
        ["data.train=nowhere/train"],
        "nowhere/train.idx: cannot be read (No such file or directory)",
    ),
    "no validation data": (["data.valid=null"], "train.eval_every=5 needs validation data"),
    "id beyond the vocabulary": (
        ["model.vocab_size=256"],
        "holds token id 256, but model.vocab_size=256: it must be at least 257",
    ),
    "no vocabulary": (["model.vocab_size=null"], "model.vocab_size is missing"),
    "run directory is a file": (["run_dir=/dev/null"], "run_dir=/dev/null is a file; name a folder"),
    "run directory can't be made": (["run_dir=/proc/nothing"], "run_dir=/proc/nothing can't be written"),
    "no such checkpoint": (["--resume", "nowhere"], "resume=nowhere: there is no such folder"),
    "no processes": (["--nproc", "0"], "nproc is 0"),
}


@pytest.fixture(scope="module")
def refused(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Runs the command with arguments, which it must refuse; returns its message."""
    folder = tmp_path_factory.mktemp("refused")
    (folder / "fake" / "torch").mkdir(parents=True)
    (folder / "fake" / "torch" / "__init__.py").write_text(NO_TORCH)
    count = iter(range(1000))

    def refused(*arguments: str, config: Path | None = None) -> str:
        run_dir = folder / f"run{next(count)}"
        config = config or write_config(folder / "config.yaml", raw_config(data, run_dir))
        path = f"{folder / 'fake'}:{Path(__file__).parents[2]}"
        nproc = None if "--nproc" in arguments else 2
        began = time.monotonic()
        command = run(config, *arguments, nproc=nproc, PYTHONPATH=path, PYTHONDONTWRITEBYTECODE="1")
        assert time.monotonic() - began < 60
        assert command.code == 2, command.errors
        assert command.out == "" and "Traceback" not in command.errors
        assert command.errors.startswith("megnorm: ") and command.errors.count("megnorm: ") == 1
        assert not run_dir.exists(), "a refused run leaves nothing behind"
        return command.errors

    return refused


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_message(mistake: str, refused: Callable[..., str]) -> None:
    arguments, said = MISTAKES[mistake]
    assert said in refused(*arguments)


def test_the_message_names_the_nearest_configuration_file(
    refused: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "demo.yaml").write_text("run_dir: x\n")
    assert f"no configuration file {tmp_path}/dmo.yaml; did you mean {tmp_path}/demo.yaml?" in refused(
        config=tmp_path / "dmo.yaml"
    )
    assert "is missing" in refused(config=tmp_path / "demo.yaml")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("empty", "0 documents with 0 tokens give no sample of 32 + 1 tokens"),
        ("short", "1 documents with 32 tokens give no sample of 32 + 1 tokens"),
        ("cut bin", "train.bin: 100 bytes, but train.idx describes"),
        ("cut idx", "train.idx: 50 bytes, but its header"),
        ("empty idx", "train.idx: 0 bytes, an index has at least 34"),
        ("foreign idx", "not a Megatron index"),
    ],
)
def test_a_damaged_dataset_is_refused(
    damage: str, said: str, data: Path, refused: Callable[..., str], tmp_path: Path
) -> None:
    prefix = tmp_path / "train"
    if damage in ("empty", "short"):
        with IndexedWriter(prefix, best_dtype(VOCAB)) as writer:
            if damage == "short":
                writer.add_document(np.arange(32))
    else:
        for suffix in (".bin", ".idx"):
            shutil.copy(f"{data / 'train'}{suffix}", f"{prefix}{suffix}")
        size = {"cut bin": 100, "cut idx": 50, "empty idx": 0}.get(damage)
        file = Path(f"{prefix}.{damage.split()[-1]}")
        file.write_bytes(file.read_bytes()[:size] if size is not None else b"x" * 400)
    message = refused(f"data.train={prefix}")
    assert said in message
