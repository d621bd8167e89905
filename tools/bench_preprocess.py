"""Measures preprocessing beside a faithful loop over megatron-core's builder, on the same corpus and tokenizers.

The corpus is the Python standard library, repeated with changed words up to --megabytes. Each run is a fresh
process with its children; CPU-seconds and the memory of the whole tree are its own. The output of all runs
with one tokenizer is compared byte by byte. The ratios are to the first row. Needs megatron-core (extra "test").
"""

from __future__ import annotations

import argparse
import filecmp
import random
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import orjson
import psutil
from rich.console import Console
from rich.table import Table

from megnorm.data.command import ToolFailure, run_tool
from megnorm.data.corpus import write_stdlib_corpus
from megnorm.data.tokenizer_training import train_hf_bpe, train_sentencepiece

ROOT = Path(__file__).resolve().parents[1]
_CHANGED = 50  # about one line in so many of a repetition is shuffled, so that it isn't all the same words

# Megatron-LM's tools/preprocess_data.py without its options: a pool that encodes document by document, through
# the classes that Megatron's tokenizers call, and a parent that adds each to megatron-core's builder.
MEGATRON = """
import json, multiprocessing, os, sys
os.environ["TOKENIZERS_PARALLELISM"] = "false"
import torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
kind, model, source, prefix, workers = sys.argv[1:]
if kind == "HFTokenizer":
    import transformers
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=model)
    ids_of = lambda text: tokenizer(text).input_ids
    end, size = tokenizer.convert_tokens_to_ids("<|endoftext|>"), len(tokenizer)
else:
    from sentencepiece import SentencePieceProcessor
    tokenizer = SentencePieceProcessor(model_file=model)
    ids_of, end, size = tokenizer.encode_as_ids, tokenizer.eos_id(), tokenizer.get_piece_size()
def encode(line):
    ids = ids_of(json.loads(line)["text"])
    if ids:
        ids.append(end)
    return ids, [len(ids)] if ids else []
builder = IndexedDatasetBuilder(prefix + ".bin", dtype=DType.optimal_dtype(size))
with multiprocessing.Pool(int(workers)) as pool, open(source, encoding="utf-8") as lines:
    for ids, lengths in pool.imap(encode, lines, 32):
        builder.add_document(ids, lengths)
    pool.close()
    pool.join()
builder.finalize(prefix + ".idx")
"""


@dataclass(frozen=True)
class Cost:
    """CPU-seconds of a process and its children, wall seconds, the largest memory of all together in MB."""

    cpu: float
    wall: float
    memory: float


def build_corpus(folder: Path, megabytes: float) -> Path:
    """The corpus as JSONL of about `megabytes`."""
    write_stdlib_corpus(folder)
    texts = [orjson.loads(line)["text"] for line in open(folder / "train.jsonl", "rb")]
    path, size, draw = folder / "bench.jsonl", 0, random.Random(0)
    with open(path, "wb") as file:
        repetition = 0
        while size < megabytes * 1e6:
            for text in texts:
                size += file.write(
                    orjson.dumps({"text": changed(text, draw) if repetition else text}) + b"\n"
                )
                if size >= megabytes * 1e6:
                    break
            repetition += 1
    return path


def changed(text: str, draw: random.Random) -> str:
    """The text with the letters of some lines shuffled."""
    lines = text.split("\n")
    for k in range(0, len(lines), _CHANGED):
        line = lines[(k + draw.randrange(_CHANGED)) % len(lines)]
        lines[(k + draw.randrange(_CHANGED)) % len(lines)] = "".join(draw.sample(line, len(line)))
    return "\n".join(lines)


def measure(command: list[str]) -> Cost:
    """Runs a command and measures it with its children."""
    before = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    peak = [0.0]
    watcher = threading.Thread(target=watch, args=(process, peak))
    watcher.start()
    errors = process.stderr.read()
    _, status, used = os_wait(process)
    watcher.join()
    if status:
        raise ToolFailure(f"{' '.join(command[:3])} ...: {errors.strip()[-500:]}")
    return Cost(used.ru_utime + used.ru_stime, time.perf_counter() - before, peak[0])


def os_wait(process: subprocess.Popen):
    """(pid, exit status, resources of the process and of the children that it waited for)."""
    import os

    pid, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return pid, process.returncode, used


def watch(process: subprocess.Popen, peak: list[float]) -> None:
    """Keeps the largest sum of what the processes of a tree hold, shared pages counted once each."""
    tree = psutil.Process(process.pid)
    while process.returncode is None:
        total = 0
        try:
            for one in (tree, *tree.children(recursive=True)):
                total += one.memory_full_info().pss
        except psutil.Error:
            pass
        peak[0] = max(peak[0], total / 1e6)
        time.sleep(0.1)


def ours(kind: str, model: Path, source: Path, prefix: Path, backend: str, workers: int) -> list[str]:
    """The command of a run of ours."""
    return [
        *(sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--input", str(source), "--append-eod"),
        *("--output-prefix", str(prefix), "--tokenizer-type", kind, "--tokenizer-model", str(model)),
        *("--tokenizer-backend", backend, "--workers", str(workers)),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="for the corpus and everything written")
    parser.add_argument("--megabytes", type=float, default=181, help="of the corpus (default: %(default)g)")
    parser.add_argument("--vocab-size", type=int, default=32000, help="(default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="processes of each (default: %(default)s)")
    args = parser.parse_args()
    console, folder = Console(), args.folder
    folder.mkdir(parents=True, exist_ok=True)
    source = build_corpus(folder, args.megabytes)
    models = {"HFTokenizer": folder / "hf.json", "SentencePieceTokenizer": folder / "sp.model"}
    trainers = {"HFTokenizer": train_hf_bpe, "SentencePieceTokenizer": train_sentencepiece}
    for kind, model in models.items():
        if not model.exists():
            trainers[kind]([str(folder / "train.jsonl")], model.with_suffix(""), args.vocab_size, megabytes=8)
    hf, sp = models
    table = Table(title=f"{source.stat().st_size / 1e6:.0f} MB of JSONL, {args.workers} workers")
    for column in (
        "tokenizer",
        "run by",
        "CPU-s",
        "wall s",
        "MB",
        "ratio",
        "goal",
        "same",
    ):
        table.add_column(column, justify="right")
    base: Cost | None = None
    runs = [(hf, "megatron", ""), (sp, "megatron", ""), (hf, "gigatoken", "40x"), (sp, "gigatoken", "")]
    for kind, backend, goal in [*runs, (hf, "tiktoken", "8x"), (sp, "native", "1.4x"), (hf, "native", "")]:
        prefix = folder / f"{kind}-{backend}"
        with console.status(f"{kind} by {backend}"):
            if backend == "megatron":
                prefix = Path(f"{prefix}_text_document")
                said = [str(models[kind]), str(source), str(prefix), str(args.workers)]
                cost = measure([sys.executable, "-c", MEGATRON, kind, *said])
            else:
                cost = measure(ours(kind, models[kind], source, prefix, backend, args.workers))
        base = base or cost
        files = [
            [folder / f"{kind}-{name}_text_document{suffix}" for name in ("megatron", backend)]
            for suffix in (".bin", ".idx")
        ]
        same = all(filecmp.cmp(*pair, shallow=False) for pair in files)
        figures = (f"{cost.cpu:.2f}", f"{cost.wall:.1f}", f"{cost.memory:.0f}", f"{base.cpu / cost.cpu:.1f}x")
        table.add_row(kind, backend, *figures, goal, "yes" if same else "NO")
    console.print(table)
    return 0


if __name__ == "__main__":
    run_tool(main)
