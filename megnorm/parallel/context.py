"""Context parallelism by exchanging tokens for heads around the attention core: DeepSpeed's Ulysses
(arXiv:2309.14509).

The ranks of a group hold adjacent parts of the same sequences. They are neighbours among the data-parallel
ranks, so the mean of gradients over these covers them too.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

Core = Callable[..., Tensor]


class WholeContext:
    """A group of one rank, which holds whole sequences."""

    rank = 0
    size = 1

    def around(self, core: Core) -> Core:
        """An attention core over whole sequences as one over the part of them that is here:
        q [b, h, s / n, e], k and v [b, k, s / n, e] -> [b, h, s / n, e]; what it takes beside
        them is about whole sequences."""
        return core


class ContextParallel(WholeContext):
    """A group of several ranks; part ``rank`` of the sequence is here."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def around(self, core: Core) -> Core:
        from deepspeed.sequence.layer import DistributedAttention

        def over_whole_sequences(q: Tensor, k: Tensor, v: Tensor, *about: Any) -> Tensor:
            return core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), *about).transpose(1, 2)

        # Takes and gives [b, s / n, h, e], and calls the core with [b, s, h / n, e].
        ulysses = DistributedAttention(over_whole_sequences, self.group, scatter_idx=2, gather_idx=1)

        def over_parts(q: Tensor, k: Tensor, v: Tensor, *about: Any) -> Tensor:
            parts = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            return ulysses(*parts, 0, None, *about).transpose(1, 2)  # 0: dimension of the batch; no rotation here

        return over_parts
