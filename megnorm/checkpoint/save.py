"""Save the training state of an engine: all ranks together, wholly or not at all."""

import hashlib
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save as to_bytes
from torch import Tensor

from megnorm.checkpoint import storage
from megnorm.checkpoint.manifest import STATE, Entry, File, Manifest, Part, encode
from megnorm.engine.state import optimizer_step, other_states, read_state
from megnorm.parallel.groups import Groups
from megnorm.parallel.sharding import Sharding, sharding_of

FILE_BYTES = 256 << 20


class SaveFailed(RuntimeError):
    """The checkpoint could not be written, for a reason outside the run; the earlier ones are as before."""


class ReplicasDiffer(RuntimeError):
    """Ranks that must hold equal values don't: the run itself is wrong, and nothing was saved."""


@dataclass(frozen=True)
class Saved:
    """What a save did; ``warnings``: what went wrong after the checkpoint was complete."""

    path: Path
    size: int
    seconds: float
    removed: list[Path]
    warnings: list[str]


@dataclass
class _Record:
    """What one rank wrote, for the manifest."""

    optimizer_step: int = 0
    error: str | None = None
    unequal: list[str] = field(default_factory=list)
    files: dict[str, File] = field(default_factory=dict)
    tensors: dict[str, tuple[Sharding, tuple[str, ...], str]] = field(default_factory=dict)


def save(run_dir: str | Path, engine, groups: Groups, *, trainer: dict[str, Any], config: dict[str, Any],
         keep_last: int, keep_every: int = 0, file_bytes: int = FILE_BYTES) -> Saved:
    """Write the checkpoint of ``trainer["step"]``; a collective call of all ranks, between two steps.

    One rank of each pipeline stage, tensor- and expert-parallel index writes, in files of about ``file_bytes`` (it
    holds a few times as much in memory). trainer, config: JSON values. Then all checkpoints are removed but
    the last ``keep_last`` and each of a step divisible by ``keep_every``. Raises, on all ranks alike and with
    no file left: SaveFailed (no space, no permission, ...; training may go on), ReplicasDiffer (it should
    not).
    """
    began, step = time.monotonic(), trainer["step"]
    serial = _on_first(lambda: storage.prepare(run_dir, step))
    record = _write_parts(engine, groups, storage.temporary(run_dir, step), file_bytes)
    record.optimizer_step = optimizer_step(engine)
    records = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(record, records)
    layout = {"tp": groups.layout.tp, "pp": groups.layout.pp, "dp": groups.layout.dp, "ep": groups.layout.ep,
              "zero_stage": engine.zero_optimization_stage()}
    about = {"serial": serial, "step": step, "optimizer_step": record.optimizer_step, "layout": layout,
             "trainer": trainer, "config": config}
    path, size, removed, warnings = _on_first(
        lambda: _finish(run_dir, records, about, keep_last, keep_every))
    return Saved(path, size, time.monotonic() - began, removed, warnings)


def _on_first(work: Callable[[], Any]) -> Any:
    """Do something on rank 0: all ranks return its result, or raise its failure."""
    answer = [None, None, None]
    if dist.get_rank() == 0:
        try:
            answer = [work(), None, None]
        except ReplicasDiffer as error:
            answer = [None, "replicas", str(error)]
        except (OSError, SaveFailed) as error:
            answer = [None, "save", str(error)]
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise (ReplicasDiffer if answer[1] == "replicas" else SaveFailed)(answer[2])
    return answer[0]


def _write_parts(engine, groups: Groups, folder: Path, file_bytes: int) -> _Record:
    """Write this rank's share. A failure is kept in the record: the others wait for its collectives."""
    writers = groups.at.dp * groups.layout.tp + groups.at.tp  # before this one on its stage
    writer = _PartWriter(folder, f"part-{groups.at.pp:02d}-{writers:02d}", file_bytes)
    digests: dict[tuple[str, int], str] = {}
    for sharding, values in _all_state(engine, groups):
        if not (groups.first_model and groups.accounts_for(sharding)):
            continue
        if sharding.count < groups.layout.tp:
            digests[sharding.name, sharding.index] = _digest(values)
        if sharding.first:
            for number, part in enumerate(sharding.by_expert()):
                writer.add(part, {key: sharding.cut(value)[number] for key, value in values.items()})
    writer.flush()
    if groups.layout.tp > 1:
        replicas: list = [None] * groups.layout.tp
        dist.all_gather_object(replicas, digests, group=groups.tp_group)
        parts = {part for held in replicas for part in held}
        writer.record.unequal = sorted({name for name, index in parts
                                        if len({held[name, index] for held in replicas if (name, index) in held}) > 1})
    return writer.record


def _all_state(engine, groups: Groups) -> Iterator[tuple[Sharding, dict[str, Tensor]]]:
    yield from ((sharding_of(parameter), values) for parameter, values in read_state(engine))
    yield from ((sharding, {STATE: value}) for sharding, value in other_states(engine, groups))


class _PartWriter:
    """Collects tensors and writes them in files NAME-000.safetensors, ... of about ``limit`` bytes."""

    def __init__(self, folder: Path, name: str, limit: int):
        self.folder, self.name, self.limit = folder, name, limit
        self.record = _Record()
        self.pending: dict[str, Tensor] = {}
        self.size = 0

    def add(self, sharding: Sharding, values: dict[str, Tensor]) -> None:
        if self.record.error:
            return
        file = f"{self.name}-{len(self.record.files):03d}.safetensors"
        assert sharding.name not in self.record.tensors, f"two parameters are called {sharding.name}"
        self.record.tensors[sharding.name] = (sharding, tuple(values), file)
        for key, value in values.items():
            # A copy: safetensors refuses views of one storage, and the next parameter may reuse it.
            self.pending[f"{sharding.name}/{key}"] = value.detach().to("cpu", copy=True).contiguous()
            self.size += value.numel() * value.element_size()
        if self.size >= self.limit:
            self.flush()

    def flush(self) -> None:
        if not self.pending:
            return
        file = f"{self.name}-{len(self.record.files):03d}.safetensors"
        data = to_bytes(self.pending)
        self.pending, self.size = {}, 0
        try:
            storage.write_file(self.folder / file, data)
        except OSError as error:
            self.record.error = f"rank {dist.get_rank()}: {error}"
            return
        self.record.files[file] = File(size=len(data), sha256=hashlib.sha256(data).hexdigest())


def _digest(values: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for value in values.values():
        digest.update(value.detach().cpu().contiguous().view(-1).numpy())
    return digest.hexdigest()


def _finish(run_dir: str | Path, records: list[_Record], about: dict[str, Any], keep_last: int,
            keep_every: int) -> tuple[Path, int, list[Path], list[str]]:
    """Rank 0, when all have written: manifest, rename, pointer, retention."""
    step, folder = about["step"], storage.temporary(run_dir, about["step"])
    try:
        _refuse_failed(records, folder)
        files = {name: file for record in records for name, file in record.files.items()}
        manifest = Manifest(files=files, tensors=_entries(records), **about)
        path = storage.publish(run_dir, step, encode(manifest))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    removed, warnings = [], []
    try:  # from here on the checkpoint is complete, and found without the pointer
        storage.point(run_dir, step)
        removed = storage.prune(run_dir, keep_last, keep_every)
    except OSError as error:
        warnings.append(f"{path.name} is complete, but tidying up after it failed: {error}")
    return path, sum(file.size for file in files.values()), removed, warnings


def _refuse_failed(records: list[_Record], folder: Path) -> None:
    steps = {record.optimizer_step for record in records}
    assert len(steps) == 1, f"the ranks' optimizers have made different numbers of updates: {sorted(steps)}"
    errors = [record.error for record in records if record.error]
    if errors:
        raise SaveFailed("; ".join(dict.fromkeys(errors)))
    unequal = sorted({name for record in records for name in record.unequal})
    if unequal:
        raise ReplicasDiffer(f"not saved: {len(unequal)} replicated parameters differ over their "
                             f"tensor-parallel ranks: {', '.join(unequal[:8])}"
                             f"{', ...' if len(unequal) > 8 else ''}")
    missing = [name for record in records for name in record.files if not (folder / name).exists()]
    if missing:
        raise SaveFailed(f"rank 0 doesn't see {missing[0]}, which another rank wrote: run_dir must be on a "
                         "file system that all nodes share")


def _entries(records: list[_Record]) -> dict[str, Entry]:
    """Every tensor of the model with the slices of all ranks."""
    found: dict[str, list[tuple[Sharding, tuple[str, ...], str]]] = {}
    for record in records:
        for name, written in record.tensors.items():
            found.setdefault(name, []).append(written)
    entries = {}
    for name, slices in found.items():
        sharding, keys, _ = slices[0]
        assert all((s.shape, s.dim, k) == (sharding.shape, sharding.dim, keys) for s, k, _ in slices), slices
        parts = tuple(_part(s, file) for s, _, file in sorted(slices, key=lambda item: item[0].index))
        entries[name] = Entry(shape=sharding.shape, dim=sharding.dim, keys=keys, parts=parts)
    return entries


def _part(sharding: Sharding, file: str) -> Part:
    if sharding.dim is None:
        return Part(file=file)
    where = sharding.slices()[sharding.dim]
    return Part(file=file, start=where.start, stop=where.stop)
