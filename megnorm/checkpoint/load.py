"""Load a checkpoint into an engine of any layout; each rank reads the slices that it needs."""

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from megnorm.checkpoint import resume, storage
from megnorm.checkpoint.manifest import STATE, Entry, Manifest, Unreadable
from megnorm.checkpoint.resume import CheckpointError, Choice
from megnorm.engine.state import MASTER, is_second_copy, local_parameters, moment_keys, other_states, write_state
from megnorm.parallel.groups import Groups
from megnorm.parallel.sharding import Sharding, sharding_of


@dataclass(frozen=True)
class Loaded:
    """The checkpoint's own words (step, trainer state, configuration, layout); a line on what was read."""

    manifest: Manifest
    report: str


def choose_together(run_dir: str | Path, wanted: str) -> Choice:
    """``resume.choose`` on rank 0, which verifies every file; all ranks get its answer or raise its error."""
    answer = [None, None]
    if dist.get_rank() == 0:
        try:
            answer = [resume.choose(run_dir, wanted), None]
        except CheckpointError as error:
            answer = [None, str(error)]
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise CheckpointError(answer[1])
    return answer[0]


def load(path: Path, engine, groups: Groups) -> Loaded:
    """Give the engine the checkpoint's masters, moments and step count; a collective call of all ranks.

    The checksums are ``choose``'s matter; here, sizes are checked. Raises CheckpointError on all ranks alike,
    naming the tensors, when a parameter is missing, is left over, or has another shape: before anything is
    changed; and when a tensor could not be read, or was not read exactly once over the ranks of a replica.
    """
    manifest, problems = None, []
    try:
        manifest = storage.verify(path, checksums=False)
        problems = _misfits(engine, groups, manifest)
    except Unreadable as error:
        problems = [str(error)]
    _raise_together(path, problems)
    planned = Counter()
    for sharding, owned, keys in _wanted(engine, groups):
        for key in keys:
            planned[sharding.name, key] += prod(sharding.local_shape) * owned
    _raise_together(path, _uncovered(planned, manifest, engine, groups))
    with ExitStack() as stack:
        reader = _Reader(path, manifest, groups, stack)
        write_state(engine, reader.of_parameter, manifest.optimizer_step)
        for sharding, value in other_states(engine, groups):
            value.copy_(reader.read(sharding, STATE, sharding.first and groups.accounts_for(sharding)))
    _raise_together(path, reader.problems or _uncovered(reader.counts, manifest, engine, groups))
    tensors = sum(len(entry.keys) for entry in manifest.tensors.values())
    return Loaded(manifest, f"{tensors} tensors of {len(manifest.tensors)} parameters read, each once")


class _Reader:
    """Reads this rank's part of tensors, whatever cut they were written with, and counts what it read."""

    def __init__(self, path: Path, manifest: Manifest, groups: Groups, stack: ExitStack):
        self.path, self.manifest, self.groups, self.stack = path, manifest, groups, stack
        self.files: dict[str, safe_open] = {}
        self.counts: Counter[tuple[str, str]] = Counter()
        self.problems: list[str] = []

    def of_parameter(self, parameter: nn.Parameter, key: str) -> Tensor:
        """This rank's part of a master or of a moment."""
        sharding, owned = sharding_of(parameter), _is_owned(parameter, self.groups)
        return sharding.join([self.read(part, key, owned) for part in sharding.by_expert()])

    def read(self, sharding: Sharding, key: str, owned: bool) -> Tensor:
        """This rank's part of a tensor, counted where it is this rank's own. A failure is noted, and zeros go on:
        the other ranks wait for this one."""
        try:
            value = self._slice(sharding.name, key, sharding.slices())
            if tuple(value.shape) != sharding.local_shape or value.dtype != torch.float32:
                raise Unreadable(f"is {tuple(value.shape)} {value.dtype} in the file")
        except (SafetensorError, OSError, Unreadable) as error:
            self.problems.append(f"{sharding.name}/{key}: {error}")
            return torch.zeros(sharding.local_shape)
        self.counts[sharding.name, key] += prod(sharding.local_shape) * owned
        return value

    def _slice(self, name: str, key: str, wanted: tuple[slice, ...]) -> Tensor:
        entry = self.manifest.tensors[name]
        if entry.dim is None:
            return self._read(entry.parts[0].file, f"{name}/{key}", wanted)
        pieces, (low, high) = [], (wanted[entry.dim].start, wanted[entry.dim].stop)
        for part in entry.parts:
            start, stop = max(low, part.start), min(high, part.stop)
            if start < stop:
                here = slice(start - part.start, stop - part.start)
                pieces.append(self._read(part.file, f"{name}/{key}",
                                         wanted[:entry.dim] + (here,) + wanted[entry.dim + 1:]))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, entry.dim)

    def _read(self, file: str, tensor: str, where: tuple[slice, ...]) -> Tensor:
        if file not in self.files:
            self.files[file] = self.stack.enter_context(safe_open(self.path / file, framework="pt"))
        if not where:
            return self.files[file].get_tensor(tensor)
        return self.files[file].get_slice(tensor)[where]


def _is_owned(parameter: nn.Parameter, groups: Groups) -> bool:
    """Whether this rank counts what it reads: replicas and second copies of tied weights don't count."""
    sharding = sharding_of(parameter)
    return sharding.first and groups.accounts_for(sharding) and not is_second_copy(parameter)


def _wanted(engine, groups: Groups) -> list[tuple[Sharding, bool, tuple[str, ...]]]:
    """What this rank reads, expert by expert: from where, whether it counts here, under which keys."""
    keys = (MASTER, *moment_keys(engine))
    parameters = [(part, _is_owned(p, groups), keys) for p in local_parameters(engine)
                  for part in sharding_of(p).by_expert()]
    return parameters + [(sharding, sharding.first and groups.accounts_for(sharding), (STATE,))
                         for sharding, _ in other_states(engine, groups)]


def _misfits(engine, groups: Groups, manifest: Manifest) -> list[str]:
    """Local tensors that the checkpoint can't fill."""
    problems = []
    for sharding, _, keys in _wanted(engine, groups):
        entry: Entry | None = manifest.tensors.get(sharding.name)
        if entry is None:
            problems.append(f"{sharding.name} is missing")
        elif entry.shape != sharding.shape:
            problems.append(f"{sharding.name} has shape {entry.shape}, the model's has {sharding.shape}")
        elif set(entry.keys) != set(keys):
            problems.append(f"{sharding.name} was saved with {', '.join(entry.keys)}; this optimizer has "
                            f"{', '.join(keys)}")
    return problems


def _uncovered(counts: Counter[tuple[str, str]], manifest: Manifest, engine, groups: Groups) -> list[str]:
    """Tensors of which not every element was read exactly once over the ranks of a model replica."""
    tensors = [(name, key) for name, entry in manifest.tensors.items() for key in entry.keys]
    read = torch.tensor([counts[tensor] for tensor in tensors], device=engine.device)
    dist.all_reduce(read, group=groups.model_group)
    problems = []
    for (name, key), n in zip(tensors, read.tolist(), strict=True):
        size = prod(manifest.tensors[name].shape)
        if n != size:
            how = f"was read {n / size:g} times" if n else "is left over: the model has no such parameter"
            problems.append(f"{name}/{key} {how}")
    return problems


def _raise_together(path: Path, problems: list[str]) -> None:
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, problems)
    found = list(dict.fromkeys(problem for rank in everyone for problem in rank))
    if found:
        more = f"; and {len(found) - 8} more" if len(found) > 8 else ""
        raise CheckpointError(f"{path} doesn't fit this run: {'; '.join(found[:8])}{more}")
