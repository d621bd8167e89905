"""Measures the orders of samples and best-fit packing over fabricated lengths: CPU-seconds and memory.

Memory is what the process takes beyond the lengths themselves, which lie mapped in a file. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from megnorm.data.command import run_tool
from megnorm.data.index_cache import IndexCache
from megnorm.data.megatron_order import MegatronMap
from megnorm.data.packing import pack
from megnorm.data.samples import SampleMap
from megnorm.data.seeds import permutation

_SEQUENCE = 2048


def fabricate(path: Path, documents: int) -> np.ndarray:
    """Log-normal lengths of about 700 tokens, and boundaries, in one mapped file."""
    out = np.lib.format.open_memmap(path, "w+", np.int32, (documents,))
    random = np.random.default_rng(0)
    for a in range(0, documents, 1 << 20):
        n = min(1 << 20, documents - a)
        out[a : a + n] = np.clip(random.lognormal(6.0, 1.1, n), 1, 1 << 20)
    out.flush()
    boundaries = np.lib.format.open_memmap(path.with_suffix(".b.npy"), "w+", np.int64, (documents + 1,))
    for a in range(0, documents + 1, 1 << 20):
        boundaries[a : a + (1 << 20)] = np.arange(a, min(a + (1 << 20), documents + 1))
    return out


def default_order(path: Path, cache: str | None) -> int:
    """All of the first epoch, and some samples."""
    lengths, boundaries = (np.load(p, mmap_mode="r") for p in (path, path.with_suffix(".b.npy")))
    order = SampleMap(lengths, boundaries, (0, len(lengths)), _SEQUENCE, 1, "b", cache=IndexCache(cache))
    for n in range(0, order.samples_per_epoch, order.samples_per_epoch // 100):
        order.segments(n)
    return order.samples_per_epoch


def megatron_order(path: Path, cache: str | None) -> int:
    """Megatron's indices of one epoch, and some samples."""
    lengths = np.load(path, mmap_mode="r")
    order = MegatronMap(lengths, (0, len(lengths)), _SEQUENCE, 1, 1, cache=IndexCache(cache))
    for n in range(0, order.num_samples, order.num_samples // 100):
        order.segments(n)
    return order.num_samples


def packing(path: Path, cache: str | None) -> int:
    """Best-fit packing of the documents in some order."""
    lengths = np.load(path)
    order = permutation(len(lengths), 1)
    started = time.process_time()
    bins = len(pack(lengths, order, _SEQUENCE + 1))
    print(f"  of it the packing itself: {time.process_time() - started:.2f} CPU-s")
    return bins


def anonymous_peak(stop: multiprocessing.synchronize.Event, pid: int, peak) -> None:
    """Watches the memory of a process that isn't mapped from files."""
    while not stop.wait(0.02):
        try:
            for line in open(f"/proc/{pid}/status"):
                if line.startswith("RssAnon:"):
                    peak.value = max(peak.value, int(line.split()[1]) / 1e3)
        except OSError:
            return


def measure(
    work: Callable[[Path, str | None], int], path: Path, cache: str | None
) -> tuple[int, float, float]:
    """(result, CPU-seconds, MB of anonymous memory) of some work in a fresh process."""
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(False)
    child = context.Process(target=_child, args=(send, work, path, cache))
    child.start()
    stop, peak = context.Event(), context.Value("d", 0.0)
    watcher = context.Process(target=anonymous_peak, args=(stop, child.pid, peak))
    watcher.start()
    result, cpu = receive.recv()
    child.join()
    stop.set()
    watcher.join()
    return result, cpu, peak.value


def _child(send, work, path: Path, cache: str | None) -> None:
    result = work(path, cache)
    used = resource.getrusage(resource.RUSAGE_SELF)
    send.send((result, used.ru_utime + used.ru_stime))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--documents", type=float, default=1e8, help="of the orders (default: %(default)g)")
    parser.add_argument("--packed", type=float, default=1e7, help="documents to pack (default: %(default)g)")
    parser.add_argument("--folder", type=Path, help="for the fabricated files (default: a temporary one)")
    args = parser.parse_args()
    table = Table(title=f"samples of {_SEQUENCE} + 1 tokens")
    for column in ("", "documents", "samples", "CPU-s", "MB"):
        table.add_column(column, justify="right")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        path, small = Path(folder) / "lengths.npy", Path(folder) / "small.npy"
        fabricate(path, int(args.documents))
        fabricate(small, int(args.packed))
        for name, work, file, cache in [
            ("default order", default_order, path, None),
            ("default order, into a cache", default_order, path, str(Path(folder) / "cache")),
            ("default order, from the cache", default_order, path, str(Path(folder) / "cache")),
            ("Megatron's order", megatron_order, path, None),
            ("best-fit packing", packing, small, None),
        ]:
            result, cpu, memory = measure(work, file, cache)
            documents = f"{len(np.load(file, mmap_mode='r')):,}"
            table.add_row(name, documents, f"{result:,}", f"{cpu:.1f}", f"{memory:,.0f}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    run_tool(main)
