"""Count what ranks send each other in a training step, by axis and kind, and how long they wait for it."""

import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from unittest.mock import patch

import torch
import torch.distributed as dist

from megnorm.config import Config
from megnorm.parallel.groups import Groups, make_groups
from megnorm.plan.layout import make_layout
from megnorm.testing.parity import micro_batches

# Function of torch.distributed: (kind, which argument holds what this rank passes in).
KINDS = {"all_reduce": ("all_reduce", 0), "reduce": ("reduce", 0), "broadcast": ("broadcast", 0),
         "all_gather": ("all_gather", 1), "all_gather_single": ("all_gather", 1),
         "all_gather_into_tensor": ("all_gather", 1), "reduce_scatter_single": ("reduce_scatter", 1),
         "reduce_scatter_tensor": ("reduce_scatter", 1), "all_to_all_single": ("all_to_all", 1), "send": ("send", 0)}


class Meter:
    """Bytes and seconds by (axis, kind) of the calls made between ``start`` and the end of ``stack``.

    Made before the engine, which keeps some of torch's functions from its own start.
    """

    def __init__(self, stack: ExitStack):
        self.axes: dict[tuple[int, ...], str] = {}
        self.sent: dict[tuple[str, str], int] = defaultdict(int)
        self.seconds: dict[tuple[str, str], float] = defaultdict(float)
        self._off = True
        for name, (kind, place) in KINDS.items():
            stack.enter_context(patch.object(dist, name, self._counting(getattr(dist, name), kind, place)))

    def start(self, groups: Groups) -> None:
        """Count from here on; groups of one rank send nothing."""
        ranks = {axis: dist.get_process_group_ranks(getattr(groups, f"{axis}_group")) for axis in ("dp", "tp", "pp")}
        if groups.layout.cp > 1:
            ranks["cp"] = dist.get_process_group_ranks(groups.cp.group)
        if groups.layout.ep > 1:
            ranks["ep"] = dist.get_process_group_ranks(groups.ep.group)
        self.axes = {tuple(members): axis for axis, members in ranks.items()}
        self._off = False

    def _counting(self, call: Callable, kind: str, place: int) -> Callable:
        def counted(*args, **kwargs):
            members = _members(kwargs.get("group"))
            if self._off or len(members) == 1:
                return call(*args, **kwargs)
            tensor = args[place] if len(args) > place else next(v for v in kwargs.values() if torch.is_tensor(v))
            self._off, began = True, time.perf_counter()  # one function of torch may call another
            try:
                return call(*args, **kwargs)
            finally:
                self._off = False
                key = ("pp" if kind == "send" else self.axes.get(members, "other"), kind)
                self.sent[key] += tensor.numel() * tensor.element_size()
                self.seconds[key] += time.perf_counter() - began
        return counted


def _members(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))


def measured_step(config: Config, steps: int, local_statistic: bool = False) -> dict:
    """On every rank: bytes and seconds by (axis, kind) and the wall time, of each of the last ``steps - 1`` steps
    as a mean. local_statistic: norms over sharded axes take this rank's share only (a wrong result, for its cost)."""
    from megnorm.build import build_engine
    from megnorm.engine.start import start
    from megnorm.parallel.tensor import TensorParallel

    device = torch.device("cpu")
    with ExitStack() as stack:
        meter = Meter(stack)
        start(device, 600)
        groups = make_groups(make_layout(config, dist.get_world_size()), device, config.model.kv_heads)
        engine = build_engine(config, groups)
        if local_statistic:
            stack.enter_context(patch.object(TensorParallel, "statistic", lambda self, x: x * self.size))
        engine.step(micro_batches(config, groups, 0), 1e-3, 1)
        dist.barrier()
        meter.start(groups)
        wall, cpu = time.perf_counter(), time.process_time()
        for step in range(1, steps):
            engine.step(micro_batches(config, groups, step), 1e-3, step + 1)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    count = steps - 1
    return {"sent": {key: size // count for key, size in meter.sent.items()},
            "seconds": {key: value / count for key, value in meter.seconds.items()},
            "wall": wall / count, "cpu": cpu / count, "stage": groups.at.pp}
