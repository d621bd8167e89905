"""What each norm scheme costs in a training step, beside ``pre``: CPU-seconds, share of the norms, tensor memory.

The model runs in a plain torch loop: the engine costs every scheme the same, and tools/bench_step.py measures it.
"""

import contextlib
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from megnorm.config import parse_norm
from megnorm.launcher import MALLOC_SETTINGS, process_environment
from megnorm.norms import SCHEMES, resolve
from megnorm.testing.bench_step import SHAPES, Shape

BASE = "pre"
TOGETHER = 8  # schemes in one process beside ``pre``: bounds its memory
SIZES = {"d256": SHAPES["S"], "d512": Shape(hidden=512, layers=8, heads=8, kv_heads=4, ffn_hidden=2048, vocab=8192,
                                            sequence=512, batch=2)}
HYBRID_LIMIT, LIMIT = 1.10, 1.25


class Cost(NamedTuple):
    """seconds: of CPU, the median step; ratio: to the steps of ``pre`` taken in turn with them; norms: share of the
    step within norm modules, forward and backward; peak: bytes of tensors, weights and AdamW's moments included."""

    seconds: float
    ratio: float
    norms: float
    peak: int


class Measured(NamedTuple):
    """Of one scheme: CPU-seconds of each step, those within norms in a further one, bytes at the peak of a step."""

    steps: list[float]
    norms: float
    peak: int


def limit(scheme: str) -> float | None:
    """The ratio that a scheme should keep to: those with one stream and torch's attention."""
    placement = resolve(parse_norm(scheme, []), 8, 256)
    if placement.streams != "single" or placement.attention_softcap is not None:
        return None
    return HYBRID_LIMIT if scheme == "hybrid_star" else LIMIT


def bench(shape: Shape, schemes: list[str], steps: int, threads: int,
          progress: Callable[[str], None] = lambda text: None) -> dict[str, Cost]:
    """Every scheme, in processes of TOGETHER schemes and ``pre``, of which one step each is taken in turn."""
    others, found = [name for name in schemes if name != BASE], {}
    for first in range(0, max(len(others), 1), TOGETHER):
        names = [BASE, *others[first:first + TOGETHER]]
        progress(f"{', '.join(names)}")
        measured = _in_a_process(shape, names, steps, threads)
        base = statistics.median(measured[BASE].steps)
        for name in names if not first else names[1:]:
            one, seconds = measured[name], statistics.median(measured[name].steps)
            found[name] = Cost(seconds, seconds / base, one.norms / seconds, one.peak)
    return found


def _in_a_process(shape: Shape, names: list[str], steps: int, threads: int) -> dict[str, Measured]:
    """A new process: malloc reads its settings before any Python code runs."""
    settings = {"OMP_NUM_THREADS": str(threads), "DS_ACCELERATOR": "cpu", "TORCHDYNAMO_DISABLE": "1", "LOCAL_RANK": "0",
                "KINETO_LOG_LEVEL": "99"}
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(theirs, shape, names, steps, threads), daemon=True)
    with process_environment({**os.environ, **settings, **MALLOC_SETTINGS}):
        process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        raise RuntimeError(f"the process with {', '.join(names)} died; its error stands above") from None
    finally:
        process.kill()
        process.join()


def _serve(pipe: Any, shape: Shape, names: list[str], steps: int, threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
    pipe.send(measure(shape, names, steps))


def measure(shape: Shape, names: list[str], steps: int) -> dict[str, Measured]:
    """One step of each scheme in turn, after two of each that don't count."""
    from megnorm.build import build_module
    from megnorm.testing.bench_contestants import alone, batch_of, bench_config, training_loop

    batch, modules, takes = batch_of(shape), {}, {}
    for name in names:
        config = bench_config(shape, "fp32", name)
        modules[name] = module = build_module(config, alone(config))
        module.clock.step = 1
        takes[name] = training_loop(module.parameters(), lambda module=module: module(*batch))
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-2, steps):
        for name, step in takes.items():
            began = time.process_time()
            step()
            if turn >= 0:
                seconds[name].append(time.process_time() - began)
    return {name: Measured(seconds[name], statistics.median(_norm_seconds(modules[name], step) for _ in range(3)),
                           _peak(modules[name], step)) for name, step in takes.items()}


def _norm_seconds(module: Any, step: Callable[[], Any]) -> float:
    """CPU-seconds of one step within the norms."""
    with norm_clock(module) as spent:
        step()
    return math.fsum(spent)


@contextlib.contextmanager
def norm_clock(module: Any) -> Iterator[list[float]]:
    """Inside, CPU-seconds of every pass through a norm module are appended: forward, and backward as the time
    between the arrival of its output's gradient and that of its input."""
    from megnorm.model.norm import Learned

    spent: list[float] = []
    began: dict[tuple[int, str], float] = {}

    def start(way: str) -> Callable[..., None]:
        def hook(norm: Any, *_: Any) -> None:
            began[id(norm), way] = time.process_time()
        return hook

    def stop(way: str) -> Callable[..., None]:
        def hook(norm: Any, *_: Any) -> None:
            spent.append(time.process_time() - began.pop((id(norm), way)))
        return hook

    hooks = []
    for norm in (child for child in module.modules() if isinstance(child, Learned)):
        hooks += [norm.register_forward_pre_hook(start("forward")), norm.register_forward_hook(stop("forward")),
                  norm.register_full_backward_pre_hook(start("backward")),
                  norm.register_full_backward_hook(stop("backward"))]
    try:
        yield spent
    finally:
        for hook in hooks:
            hook.remove()


def _peak(module: Any, step: Callable[[], Any]) -> int:
    """Bytes of tensors: weights and moments, and the most that torch's allocator gave out beside within the step."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events, waiting = [], list(profiler.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.name == "[memory]":
            events.append((event.start_time_ns, event.extra_fields.alloc_size))
    held = most = 3 * sum(parameter.nbytes for parameter in module.parameters())
    for _, size in sorted(events, key=lambda item: item[0]):
        held += size
        most = max(most, held)
    return most


def known_schemes() -> list[str]:
    """All of the registry, ``pre`` first; ``custom`` has no norm at all."""
    return [BASE, *(name for name in SCHEMES if name != BASE)]
