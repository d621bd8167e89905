"""Linear layers and the embedding, split over tensor-parallel ranks (Shoeybi et al., arXiv:1909.08053).

They work inside the region: whoever uses them enters it once (``tp.enter``) for all column layers.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from megnorm.parallel.sharding import Constant, Normal, Role
from megnorm.parallel.tensor import Alone


class ColumnLinear(nn.Module):
    """y = x W^T + b with the output features split: x [..., in] is whole, y [..., out / tp] is a shard."""

    def __init__(self, name: str, in_features: int, out_features: int, *, bias: bool, init: Normal, tp: Alone,
                 slices: int | None = None):
        """slices: pieces that the output can be cut into; with fewer than ranks, neighbours hold copies."""
        super().__init__()
        self.tp = tp
        cut = {"dim": 0, "slices": min(slices or tp.size, tp.size)}
        self.weight = tp.parameter(f"{name}.weight", (out_features, in_features), role="matrix", init=init, **cut)
        self.bias = (tp.parameter(f"{name}.bias", (out_features,), role="bias", init=Constant(0.0), **cut)
                     if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.tp.shared(self.weight), self.tp.shared(self.bias))


class RowLinear(nn.Module):
    """y = x W^T + b with the input features split: x [..., in / tp] is a shard, y [..., out] is whole.

    The bias is added once, after the sum over ranks.
    """

    def __init__(self, name: str, in_features: int, out_features: int, *, bias: bool, init: Normal, tp: Alone):
        super().__init__()
        self.tp = tp
        self.weight = tp.parameter(f"{name}.weight", (out_features, in_features), dim=1, role="matrix", init=init)
        self.bias = (tp.on_stream(f"{name}.bias", (out_features,), role="bias", init=Constant(0.0))
                     if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        y = self.tp.leave(F.linear(x, self.weight))
        return y if self.bias is None else y + self.tp.shared(self.bias)


class VocabEmbedding(nn.Module):
    """Rows of the embedding split over ranks: ids [b, s] of the whole vocabulary to vectors [b, s, d]."""

    def __init__(self, name: str, vocab: int, width: int, *, init: Normal, tp: Alone, role: Role = "embedding"):
        super().__init__()
        self.tp = tp
        self.weight = tp.parameter(f"{name}.weight", (vocab, width), dim=0, role=role, init=init)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.weight.sharding.local_shape[0]
        local = ids - self.tp.rank * rows
        elsewhere = (local < 0) | (local >= rows)
        vectors = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self.tp.leave(vectors.masked_fill(elsewhere.unsqueeze(-1), 0.0))


def vocab_logits(x: Tensor, weight: Tensor, tp: Alone) -> Tensor:
    """Scores of this rank's slice of the vocabulary: x [b, s, d] whole, weight [v / tp, d] -> [b, s, v / tp]."""
    return F.linear(tp.enter(x), weight)
