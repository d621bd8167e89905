"""What a training step holds at most: each tensor that torch's CPU allocator gives out, in the real engine."""

import gc
import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from megnorm.config import Config
from megnorm.parallel.groups import make_groups
from megnorm.plan.layout import make_layout
from megnorm.plan.memory import BUCKET
from megnorm.testing.parity import micro_batches

BUCKETS = (BUCKET * 2, BUCKET * 4)
MARK = 54_321_987  # bytes of a tensor that nothing else allocates: it marks a moment among the events


@dataclass(frozen=True)
class Measured:
    """Bytes of one rank: held between two steps, at most within a step, and the tensors of that moment, all
    without ``bucket``, the bytes of DeepSpeed's reduce buffers, whose size doesn't depend on the model."""

    between: int
    peak: int
    bucket: int
    tensors: list[int]


def measure_step(config: Config, steps: int = 3) -> Measured:
    """On every rank: train, and look at the last of the steps, when all of the optimizer's state is there."""
    from megnorm.build import build_engine
    from megnorm.engine.start import start

    cpu = torch.device("cpu")
    start(cpu, 600)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        groups = make_groups(make_layout(config, dist.get_world_size()), cpu, config.model.kv_heads)
        engine = build_engine(config, groups)
        for step in range(steps):
            batches = micro_batches(config, groups, step)
            held = _storages()
            torch.empty(MARK, dtype=torch.uint8)
            engine.step(batches, config.optimizer.lr, step + 1)
        left = _storages()
    return _last_step(_events(profiler), held, left)


def _storages() -> set[int]:
    """Addresses of all tensors and their gradients; no graph of autograd holds others between two steps."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors = [found for found in gc.get_objects() if isinstance(found, torch.Tensor)]
        tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
        return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.device.type == "cpu"}


def _events(profiler: profile) -> list[tuple[int, int]]:
    """(address, bytes) of each allocation, (address, -bytes) of each release, in order."""
    found, waiting = [], list(profiler.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.name == "[memory]" and event.extra_fields.device.type == "cpu":
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    return [(address, size) for _, address, size in sorted(found, key=lambda item: item[0])]


def _last_step(events: list[tuple[int, int]], held: set[int], left: set[int]) -> Measured:
    """Replay the allocations; the last mark is where the last step begins.

    What gloo's threads release, buffers of a collective, is no event here. ``held`` and ``left``, the addresses in
    use before and after the step, tell them apart; they are left out.
    """
    begin = max(i for i, (_, size) in enumerate(events) if size == MARK)
    live: dict[int, int] = {}
    for address, size in events[:begin]:
        live.pop(address, None)
        if size > 0:
            live[address] = size
    live = {address: size for address, size in live.items() if address in held}
    between = peak = sum(size for size in live.values() if size not in BUCKETS)
    now, tensors, bucket = peak, sorted(live.values()), 0
    buckets = sum(size for size in live.values() if size in BUCKETS)
    never_released = _alive(events[begin + 1:])
    for number, (address, size) in enumerate(events[begin + 1:]):
        if number in never_released and address not in left:
            continue
        before = live.pop(address, 0)
        if size > 0:
            live[address] = size
        change = max(size, 0) - before
        if size in BUCKETS or before in BUCKETS:
            buckets += change
            bucket = max(bucket, buckets)
        else:
            now += change
        if now > peak:
            peak, tensors = now, sorted(live.values(), reverse=True)
    return Measured(between, peak, max(bucket, buckets), tensors)


def _alive(events: list[tuple[int, int]]) -> set[int]:
    """Numbers of the allocations that no later event releases or replaces."""
    last: dict[int, int] = {}
    for number, (address, size) in enumerate(events):
        last.pop(address, None)
        if size > 0:
            last[address] = number
    return set(last.values())
