"""The core of attention: softmax(scale q . k) v over earlier positions, by what the scores need.

q [b, h, s, e], k and v [b, k, s, e] with h a multiple of k, documents -> [b, h, s, e]. Where documents are given,
a position sees the earlier ones of its own document only.
"""

from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megnorm.model.block_causal import LONGEST, block_causal
from megnorm.model.documents import Documents
from megnorm.model.kernels import wide_dtype

Core = Callable[[Tensor, Tensor, Tensor, Documents | None], Tensor]
ROWS = 256


def make_core(scale: float | None, softcap: float | None) -> Core:
    """scale: factor on the scores, 1/sqrt(e) when None. softcap: scores become cap * tanh(scores / cap)
    before the mask (Gemma 2, arXiv:2408.00118), which torch's scaled_dot_product_attention can't do."""
    return partial(plain, scale=scale) if softcap is None else partial(capped, scale=scale, cap=softcap)


def recomputed(core: Core) -> Core:
    """A core that keeps q, k and v only; the backward pass computes the rest again."""
    return partial(checkpoint, core, use_reentrant=False, preserve_rng_state=False)


def plain(q: Tensor, k: Tensor, v: Tensor, documents: Documents | None = None, *, scale: float | None) -> Tensor:
    """torch's attention; on a CPU, where that is slow, blocks of queries."""
    if q.device.type == "cpu" and q.shape[2] <= LONGEST:
        begins = None if documents is None else documents.begins
        return block_causal(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale, begins)
    causal = partial(F.scaled_dot_product_attention, is_causal=True, scale=scale, enable_gqa=True)
    if documents is None:
        return causal(q, k, v)
    return _flex(q, k, v, scale, None, documents) if q.is_cuda else _each_alone(causal, q, k, v, documents)


def capped(q: Tensor, k: Tensor, v: Tensor, documents: Documents | None = None, *, scale: float | None,
           cap: float) -> Tensor:
    """With a soft-cap: flex_attention on CUDA, in blocks of queries elsewhere."""
    if q.is_cuda:
        return _flex(q, k, v, scale, cap, documents)
    return blockwise(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale, cap, documents)


def blockwise(q: Tensor, k: Tensor, v: Tensor, scale: float, cap: float,
              documents: Documents | None = None) -> Tensor:
    """Plain tensor code; ``ROWS`` queries at a time see only the keys up to the last of them."""
    grouped = q.unflatten(1, (k.shape[1], -1))  # [b, k, h/k, s, e]
    out = []
    for start in range(0, q.shape[2], ROWS):
        rows = grouped[..., start:start + ROWS, :]
        stop = start + rows.shape[-2]
        scores = (rows @ k[:, :, None, :stop].transpose(-1, -2)).to(wide_dtype(q))
        scores = cap * torch.tanh(scores * (scale / cap))
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(start + 1)
        if documents is not None:
            begins = documents.begins[:, None, None, start:stop, None]
            hidden = hidden | (torch.arange(stop, device=q.device) < begins)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1).to(v.dtype)
        out.append(weights @ v[:, :, None, :stop])
    return torch.cat(out, -2).flatten(1, 2)


def _each_alone(core: Callable, q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
    """A causal core over one document after the other: long rows, whose mask would be large."""
    rows = [torch.cat([core(*(x[row:row + 1, :, first:end] for x in (q, k, v))) for first, end in spans], 2)
            for row, spans in enumerate(documents.spans)]
    return torch.cat(rows)


def _flex(q: Tensor, k: Tensor, v: Tensor, scale: float | None, cap: float | None,
          documents: Documents | None = None) -> Tensor:
    attention, causal = _compiled()
    mask = causal(q.shape[2], str(q.device)) if documents is None else documents.block_mask
    return attention(q, k, v, score_mod=_soft_cap(cap), block_mask=mask, scale=scale, enable_gqa=True)


@cache
def _soft_cap(cap: float | None) -> Callable | None:
    return None if cap is None else lambda score, *_: cap * torch.tanh(score / cap)


@cache
def _compiled() -> tuple[Callable, Callable]:
    """flex_attention, and the causal mask by length and device; compiled at their first use."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    @cache
    def causal(length: int, device: str):
        return create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device=device)

    return torch.compile(flex_attention, dynamic=False), causal
