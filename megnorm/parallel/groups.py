"""Process groups of a layout, as one value that is handed to whoever needs them."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megnorm.parallel.context import ContextParallel, WholeContext
from megnorm.parallel.expert import AllExperts, ExpertParallel
from megnorm.parallel.sharding import Sharding
from megnorm.parallel.tensor import Alone, SequenceParallel, TensorParallel
from megnorm.plan.layout import Coordinates, Layout


@dataclass(frozen=True)
class Groups:
    """This rank's place and its groups: tp, cp and ep as values that modules use, the others as process groups.

    expert_dp: the data-parallel ranks that hold the same experts as this one. model: the ranks that hold one
    whole model between them, pp x ep x tp.
    """

    layout: Layout
    rank: int
    at: Coordinates
    tp: Alone
    cp: WholeContext
    ep: AllExperts
    tp_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup
    pp_group: dist.ProcessGroup
    expert_dp_group: dist.ProcessGroup
    model_group: dist.ProcessGroup
    device: torch.device

    @property
    def replica(self) -> int:
        """Which of the different micro batches this rank works on."""
        return self.at.dp // self.layout.cp

    def accounts_for(self, sharding: Sharding) -> bool:
        """Whether, of the expert-parallel ranks, this one counts and saves a parameter: each does so for its own
        experts, the first for all else."""
        return sharding.experts is not None or self.ep.rank == 0

    @property
    def first_model(self) -> bool:
        """Whether this rank is part of the first of the equal models, which speaks for the others."""
        return self.at.dp < self.layout.ep


def make_groups(layout: Layout, device: torch.device, kv_heads: int | None = None) -> Groups:
    """Create every group of the layout; a collective call of all ranks of the default group.

    kv_heads: where they are fewer than tensor-parallel ranks, the ranks that share one get a group.
    """
    rank = dist.get_rank()
    assert dist.get_world_size() == layout.world, (dist.get_world_size(), layout)
    at = layout.coordinates(rank)
    mine = {axis: _own_group(layout.groups(axis), rank) for axis in ("tp", "dp", "pp")}
    copies = {}
    if kv_heads is not None and 1 < kv_heads < layout.tp:
        share = layout.tp // kv_heads
        copies[kv_heads] = _own_group([ranks[i:i + share] for ranks in layout.groups("tp")
                                       for i in range(0, layout.tp, share)], rank)
    region = SequenceParallel if layout.sp else TensorParallel
    tp = region(mine["tp"], copies) if layout.tp > 1 else Alone()
    cp = ContextParallel(_own_group(layout.neighbours(layout.cp), rank)) if layout.cp > 1 else WholeContext()
    ep = ExpertParallel(_own_group(layout.neighbours(layout.ep), rank)) if layout.ep > 1 else AllExperts()
    same_experts = _own_group(layout.expert_replicas(), rank) if layout.ep > 1 else mine["dp"]
    return Groups(layout, rank, at, tp, cp, ep, mine["tp"], mine["dp"], mine["pp"], same_experts,
                  _own_group(layout.whole_models(), rank), device)


def _own_group(groups: list[list[int]], rank: int) -> dist.ProcessGroup:
    """Create all groups in the same order on every rank; return the one that holds this rank."""
    created = [(ranks, dist.new_group(ranks)) for ranks in groups]
    return next(group for ranks, group in created if rank in ranks)
