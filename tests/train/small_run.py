"""Tiny runs on real text: a dataset, a configuration, and the command in a process of its own."""

import importlib.util
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import yaml
from launching import ROOT, is_running, wait_for
from safetensors import safe_open

from megnorm.checkpoint.storage import checkpoints_dir, read_manifest, step_name
from megnorm.data.indexed import IndexedWriter, best_dtype
from megnorm.data.tokenizers import load_tokenizer
from megnorm.observe.metrics import FILE, read_metrics

TRAIN_TEXTS = ("argparse", "dataclasses", "functools", "json.decoder", "pathlib", "textwrap")
VALID_TEXTS = ("json.encoder", "shlex")
STEPS, SAVED = 20, 10
VOCAB = 300  # above every id of the byte tokenizer
MEASURED = ("step_seconds", "tokens_per_second", "mfu", "attempt")


def write_data(folder: Path) -> None:
    """The sources of modules of the standard library, byte by byte: FOLDER/train and FOLDER/valid."""
    tokenizer = load_tokenizer("ByteTokenizer")
    for split, modules in (("train", TRAIN_TEXTS), ("valid", VALID_TEXTS)):
        with IndexedWriter(folder / split, best_dtype(VOCAB)) as writer:
            for name in modules:
                text = Path(importlib.util.find_spec(name).origin).read_text(encoding="utf-8")
                writer.add_document([*tokenizer.encode([text])[0], tokenizer.eod])


def raw_config(data: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    """A run of seconds; changes as ``train__steps=5``."""
    raw = {
        "run_dir": str(run_dir),
        "seed": 7,
        "model": {
            "layers": 2,
            "hidden": 32,
            "heads": 4,
            "kv_heads": 2,
            "ffn_hidden": 64,
            "vocab_size": VOCAB,
            "pad_vocab_to": 4,
            "norm": "hybrid_star",
        },
        "data": {"sequence_length": 32, "train": str(data / "train"), "valid": str(data / "valid")},
        "parallel": {"timeout_seconds": 120},
        "train": {"steps": STEPS, "micro_batch": 1, "global_batch": 8, "eval_every": 5, "eval_samples": 7},
        "optimizer": {"lr": 3e-3},
        "schedule": {"kind": "cosine", "warmup_steps": 4, "min_lr": 3e-4},
        "checkpoint": {"every": SAVED},
        "observe": {"peak_tflops": 0.05},
    }
    for key, value in changes.items():
        *sections, name = key.split("__")
        node = raw
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return raw


def write_config(path: Path, raw: dict[str, Any]) -> Path:
    """The configuration as a file."""
    path.write_text(yaml.safe_dump(raw), encoding="utf-8")
    return path


class Command:
    """``megnorm train CONFIG ...`` in a process group of its own, ended by ``end``."""

    def __init__(
        self,
        *arguments: object,
        nproc: int | None = 2,
        start: Sequence[str] = ("-m", "megnorm"),
        largest_file: int | None = None,
        **environ: str,
    ) -> None:
        """start: what python runs; largest_file: bytes beyond which writing fails, as on a full device."""
        # One thread a rank: sums in the same order whatever the number of cores.
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environ}
        more = [] if nproc is None else ["--nproc", str(nproc)]
        self.process = subprocess.Popen(
            [sys.executable, *start, "train", *map(str, arguments), *more],
            env=environ,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        if largest_file is not None:  # before it has started its workers, which inherit it
            resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (largest_file, largest_file))

    def wait(self, timeout: float = 240.0) -> "Command":
        """Until it has ended; then ``code``, ``out`` and ``errors`` say how."""
        try:
            self.out, self.errors = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.end()
            raise AssertionError(f"still running after {timeout} s") from None
        self.code = self.process.returncode
        return self

    def everyone(self) -> list[psutil.Process]:
        """The command's process and all that it started."""
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def workers(self) -> dict[int, int]:
        """Process id by rank."""
        found = {}
        for process in self.everyone()[1:]:
            try:
                rank = process.environ().get("RANK")
            except psutil.Error:
                continue
            if rank is not None and "megnorm" in " ".join(process.cmdline()):
                found[int(rank)] = process.pid
        return found

    def wait_for_step(self, run_dir: Path, step: int, seconds: float = 200.0) -> None:
        """Until metrics.jsonl holds the row of a step."""
        mark = f'"step": {step},'.encode()

        def seen() -> bool:
            assert self.process.poll() is None, self.process.communicate()
            file = run_dir / FILE
            return file.exists() and mark in file.read_bytes()

        deadline = time.monotonic() + seconds
        while not seen():
            assert time.monotonic() < deadline, f"no step {step} within {seconds} s"
            time.sleep(0.002)

    def end(self) -> None:
        """SIGKILL to all of it."""
        try:
            everyone = self.everyone()
        except psutil.NoSuchProcess:
            everyone = []
        kill([process.pid for process in everyone])
        self.process.communicate()


def kill(pids: list[int]) -> None:
    """SIGKILL, all at once as far as that goes, and wait until none of them runs."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    wait_for(lambda: not any(is_running(pid) for pid in pids[1:]), 20)


def run(*arguments: object, **options: Any) -> Command:
    """The command, to its end."""
    return Command(*arguments, **options).wait()


def tensors(run_dir: Path, step: int) -> dict[str, np.ndarray]:
    """Every tensor of a checkpoint, weights and moments, by file-independent name."""
    path = checkpoints_dir(run_dir) / step_name(step)
    found: dict[str, np.ndarray] = {}
    for name in read_manifest(path).files:
        with safe_open(path / name, framework="np") as file:
            for key in file.keys():
                found[f"{name}:{key}"] = file.get_tensor(key)
    return found


def differing(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> list[str]:
    """Names of tensors that are not equal bit by bit."""
    assert a.keys() == b.keys() and a
    return [name for name in a if a[name].tobytes() != b[name].tobytes()]


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """All rows of the metrics without what a clock measured."""
    return [
        {name: value for name, value in row.items() if name not in MEASURED} for row in read_metrics(run_dir)
    ]
