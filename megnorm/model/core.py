"""The core of attention: softmax(scale q . k) v over earlier positions, by what the scores need.

q [b, h, s, e], k and v [b, k, s, e] with h a multiple of k -> [b, h, s, e].
"""

from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megnorm.model.block_causal import LONGEST, block_causal
from megnorm.model.kernels import wide_dtype

Core = Callable[[Tensor, Tensor, Tensor], Tensor]
ROWS = 256


def make_core(scale: float | None, softcap: float | None) -> Core:
    """scale: factor on the scores, 1/sqrt(e) when None. softcap: scores become cap * tanh(scores / cap)
    before the mask (Gemma 2, arXiv:2408.00118), which torch's scaled_dot_product_attention can't do."""
    return partial(plain, scale=scale) if softcap is None else partial(capped, scale=scale, cap=softcap)


def recomputed(core: Core) -> Core:
    """A core that keeps q, k and v only; the backward pass computes the rest again."""
    return partial(checkpoint, core, use_reentrant=False, preserve_rng_state=False)


def plain(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """torch's attention; on a CPU, where that is slow, blocks of queries."""
    if q.device.type == "cpu" and q.shape[2] <= LONGEST:
        return block_causal(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)


def capped(q: Tensor, k: Tensor, v: Tensor, scale: float | None, cap: float) -> Tensor:
    """With a soft-cap: flex_attention on CUDA, in blocks of queries elsewhere."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return (_flex if q.is_cuda else blockwise)(q, k, v, scale, cap)


def blockwise(q: Tensor, k: Tensor, v: Tensor, scale: float, cap: float) -> Tensor:
    """Plain tensor code; ``ROWS`` queries at a time see only the keys up to the last of them."""
    grouped = q.unflatten(1, (k.shape[1], -1))  # [b, k, h/k, s, e]
    out = []
    for start in range(0, q.shape[2], ROWS):
        rows = grouped[..., start:start + ROWS, :]
        stop = start + rows.shape[-2]
        scores = (rows @ k[:, :, None, :stop].transpose(-1, -2)).to(wide_dtype(q))
        scores = cap * torch.tanh(scores * (scale / cap))
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(start + 1)
        weights = scores.masked_fill(later, float("-inf")).softmax(-1).to(v.dtype)
        out.append(weights @ v[:, :, None, :stop])
    return torch.cat(out, -2).flatten(1, 2)


def _flex(q: Tensor, k: Tensor, v: Tensor, scale: float, cap: float) -> Tensor:
    attention, causal = _compiled()
    mask = causal(q.shape[2], str(q.device))
    return attention(q, k, v, score_mod=_soft_cap(cap), block_mask=mask, scale=scale, enable_gqa=True)


@cache
def _soft_cap(cap: float) -> Callable:
    return lambda score, *_: cap * torch.tanh(score / cap)


@cache
def _compiled() -> tuple[Callable, Callable]:
    """flex_attention, and the causal mask by length and device; compiled at their first use."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    @cache
    def causal(length: int, device: str):
        return create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device=device)

    return torch.compile(flex_attention, dynamic=False), causal
