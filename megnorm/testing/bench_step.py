"""What one training step costs in CPU-seconds: megnorm beside transformers' Llama and beside its own floor.

Each contestant lives in a process of its own, all with the same threads, malloc settings, batch and optimizer,
and one step of each is taken in turn, so that a busy machine slows all of them alike.
"""

import contextlib
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from megnorm.launcher import MALLOC_SETTINGS

Step = Callable[[], Any]

# What is measured, in the order of a turn. "plain": megnorm's model in a plain loop, without the engine.
CONTESTANTS = ("pre", "hybrid_star", "plain pre", "transformers", "floor")
LEARNING_RATE = 1e-4


class Shape(NamedTuple):
    """Sizes of a Llama with tied embeddings, and of its micro batch."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn_hidden: int
    vocab: int
    sequence: int
    batch: int

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.sequence * self.batch

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """(in, out) of every matrix product of the forward pass, attention's scores and context excepted."""
        d, f, kv = self.hidden, self.ffn_hidden, self.hidden // self.heads * self.kv_heads
        block = [(d, d), (d, kv), (d, kv), (d, d), (d, f), (d, f), (f, d)]
        return block * self.layers + [(d, self.vocab)]


SHAPES = {
    "S": Shape(hidden=256, layers=8, heads=8, kv_heads=4, ffn_hidden=1024, vocab=8192, sequence=512, batch=4),
    "M": Shape(hidden=768, layers=16, heads=12, kv_heads=4, ffn_hidden=3072, vocab=32000, sequence=512, batch=1),
}


class Cost(NamedTuple):
    """One step: CPU-seconds of the process with all its threads, and seconds on the clock."""

    cpu: float
    wall: float


class Comparison(NamedTuple):
    """A shape in a dtype: the costs of each contestant's steps, in the order in which they were taken."""

    shape: str
    dtype: str
    costs: dict[str, list[Cost]]

    def median(self, name: str) -> float:
        """CPU-seconds a step."""
        return statistics.median(cost.cpu for cost in self.costs[name])

    def ratio(self, name: str, other: str) -> float:
        """How many times as many CPU-seconds as the other; the median over turns, in which both saw the same
        load."""
        return statistics.median(a.cpu / b.cpu for a, b in zip(self.costs[name], self.costs[other], strict=True))


def compare(shape: str, dtype: str, steps: int, threads: int, equal_malloc: bool,
            contestants: tuple[str, ...] = CONTESTANTS,
            progress: Callable[[str], None] = lambda text: None) -> Comparison:
    """Take ``steps`` steps of each contestant in turn, after two of each that don't count.

    equal_malloc: transformers gets the malloc settings that megnorm's launcher sets, too.
    """
    makers = {name: partial(make_step, name, SHAPES[shape], dtype) for name in contestants}
    plain = frozenset() if equal_malloc else frozenset({"transformers"})
    costs = take_turns(makers, steps, threads, plain, lambda text: progress(f"{shape} {dtype}: {text}"))
    return Comparison(shape, dtype, costs)


def take_turns(makers: Mapping[str, Callable[[], Step]], steps: int, threads: int,
               plain_malloc: frozenset[str] = frozenset(),
               progress: Callable[[str], None] = lambda text: None) -> dict[str, list[Cost]]:
    """The costs of ``steps`` steps of each contestant, taken in turn, after two of each that don't count.

    makers: each makes its step in a process of its own, and is pickled on the way. plain_malloc: names of those
    without the launcher's malloc settings.
    """
    costs: dict[str, list[Cost]] = {name: [] for name in makers}
    with contextlib.ExitStack() as stack:
        pipes = {name: stack.enter_context(_contestant(make, threads, name not in plain_malloc))
                 for name, make in makers.items()}
        for turn in range(-2, steps):
            for name, pipe in pipes.items():
                try:
                    pipe.send("step")
                    cost = pipe.recv()
                except (EOFError, OSError):
                    raise RuntimeError(f"{name} died; its error stands above") from None
                if turn >= 0:
                    costs[name].append(cost)
            progress(f"step {turn + 1} of {steps}" if turn >= 0 else "warming up")
    return costs


@contextlib.contextmanager
def _contestant(make: Callable[[], Step], threads: int, malloc: bool) -> Iterator[Any]:
    """A process that answers each "step" with its Cost; ended on leaving."""
    settings = {"OMP_NUM_THREADS": str(threads), "DS_ACCELERATOR": "cpu", "TORCHDYNAMO_DISABLE": "1", "LOCAL_RANK": "0"}
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, make, threads), daemon=True)
    with _environment({**settings, **(MALLOC_SETTINGS if malloc else {})}, dropped=() if malloc else MALLOC_SETTINGS):
        process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()
        process.join()


@contextlib.contextmanager
def _environment(settings: Mapping[str, str], dropped: Mapping[str, str] | tuple = ()) -> Iterator[None]:
    """The environment that a process started inside gets: malloc reads it before any Python code runs."""
    before = dict(os.environ)
    os.environ.update(settings)
    for name in dropped:
        os.environ.pop(name, None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _serve(pipe: Any, make: Callable[[], Step], threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    step = make()
    while True:
        pipe.recv()
        cpu, wall = time.process_time(), time.perf_counter()
        step()
        pipe.send(Cost(time.process_time() - cpu, time.perf_counter() - wall))


def make_step(name: str, shape: Shape, dtype: str) -> Step:
    """A contestant's step, by its name in CONTESTANTS."""
    from megnorm.testing import bench_contestants as make

    if name == "floor":
        return make.floor(shape, dtype)
    if name == "transformers":
        return make.transformers_llama(shape, dtype)
    if name.startswith("plain "):
        return make.plain_loop(shape, dtype, name.removeprefix("plain "))
    return make.with_engine(shape, dtype, name)
