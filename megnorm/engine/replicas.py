"""Find parameters whose copies on several ranks have drifted apart."""

import hashlib

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megnorm.parallel.groups import Groups
from megnorm.parallel.sharding import kept_states
from megnorm.parallel.tensor import TensorParallel


def unequal_replicas(module: nn.Module, groups: Groups) -> list[str]:
    """Names of parameters that should be bit-equal on several ranks and aren't, with the ranks that differ from
    the first of theirs; the same answer on all ranks. A collective call, which costs a hash of each parameter.

    Compared are the copies of replicated parameters over tensor ranks, and all over the data-parallel ranks that
    hold them but those that ZeRO 3 keeps in parts; kept states too.
    """
    held = {p.sharding.name: p for p in module.parameters() if hasattr(p, "sharding") and p.numel()}
    digests = {name: _digest(value) for name, value in {**held, **kept_states(module)}.items()}
    slices = {name: p.sharding.count for name, p in held.items()}
    experts = [name for name, p in held.items() if p.sharding.experts is not None]
    found = _compare({name: digests[name] for name in digests if name not in experts}, groups.dp_group, groups)
    found |= _compare({name: digests[name] for name in experts}, groups.expert_dp_group, groups)
    if isinstance(groups.tp, TensorParallel):
        for count, group in groups.tp.copies.items():
            found |= _compare({name: digests[name] for name in digests if slices.get(name, 1) == count}, group, groups)
    everywhere: list[dict] = [{} for _ in range(groups.layout.world)]
    dist.all_gather_object(everywhere, found)
    return [f"{name} (ranks {', '.join(map(str, ranks))})"
            for name, ranks in sorted({**{k: v for part in everywhere for k, v in part.items()}}.items())]


def _digest(value: Tensor) -> int:
    data = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "little")


def _compare(digests: dict[str, int], group: dist.ProcessGroup, groups: Groups) -> dict[str, list[int]]:
    """Names whose digests differ within the group, with the ranks that differ from its first."""
    if not digests:
        return {}
    mine = torch.tensor(list(digests.values()), device=groups.device)
    low, high = mine.clone(), mine.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
    names = [name for name, same in zip(digests, (low == high).tolist(), strict=True) if not same]
    if not names:
        return {}
    values: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, (groups.rank, [digests[name] for name in names]), group=group)
    first = values[0][1]
    return {name: [rank for rank, own in values if own[i] != first[i]] for i, name in enumerate(names)}
