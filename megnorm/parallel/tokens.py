"""Sums over tokens that several ranks hold, each of them once."""

import torch.distributed as dist
from torch import Tensor

from megnorm.parallel.context import WholeContext
from megnorm.parallel.groups import Groups
from megnorm.parallel.tensor import Alone


class SequenceParts:
    """The ranks over which the sequences of one micro batch are cut: those of context parallelism, and those of
    tensor parallelism where the stream is sliced. This rank holds part ``index`` of ``count``."""

    def __init__(self, tp: Alone, cp: WholeContext):
        self.cutting = [ranks for ranks, cut in ((tp, tp.sliced), (cp, cp.size > 1)) if cut]
        self.index, self.count = 0, 1
        for ranks in self.cutting:
            self.index += self.count * ranks.rank
            self.count *= ranks.size

    def own(self, rows: Tensor) -> Tensor:
        """What belongs to this part, of whole rows [b, S, ...]."""
        return rows.chunk(self.count, 1)[self.index]

    def sum(self, x: Tensor) -> Tensor:
        """Over the parts; not differentiable."""
        for ranks in self.cutting:
            x = x.clone()
            dist.all_reduce(x, group=ranks.group)
        return x

    def before(self, x: Tensor) -> Tensor:
        """The sum over the parts that precede this one; not differentiable."""
        parts = x.unsqueeze(0)
        for ranks in self.cutting:
            gathered = parts.new_empty((ranks.size * len(parts), *x.shape))
            dist.all_gather_single(gathered, parts.contiguous(), group=ranks.group)
            parts = gathered
        return parts[:self.index].sum(0)


def sum_over_tokens(sums: Tensor, groups: Groups) -> Tensor:
    """Each rank's sums over its tokens to the sums over all tokens of the global batch; what a pipeline stage
    doesn't know is zero there. Tensor-parallel ranks hold the same tokens, unless the stream is sliced. A
    collective call of all ranks."""
    sums = sums.to(groups.device, copy=True)
    dist.all_reduce(sums)
    return sums / (1 if groups.layout.sp else groups.layout.tp)
