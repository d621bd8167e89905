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


def program(device: str, length: int, softcap: bool, documents: bool) -> str:
    """Which program computes attention over rows of ``length`` tokens on "cpu" or "cuda".

    torch's scaled_dot_product_attention has no soft-cap, and no mask of documents without a matrix of them; on a
    CPU it is slow where ``block_causal`` has the memory for better.
    """
    if device == "cuda" and (softcap or documents):
        return "flex_attention, compiled"
    if softcap:
        return "blocks of queries in plain tensor code"
    if device == "cpu" and length <= LONGEST:
        return "blocks of queries that skip what lies ahead"
    return "scaled_dot_product_attention" + (" of one document after the other" if documents else "")


def make_core(scale: float | None, softcap: float | None) -> Core:
    """scale: factor on the scores, 1/sqrt(e) when None. softcap: scores become cap * tanh(scores / cap)
    before the mask (Gemma 2, arXiv:2408.00118)."""
    def core(q: Tensor, k: Tensor, v: Tensor, documents: Documents | None = None) -> Tensor:
        run = PROGRAMS[program(q.device.type, q.shape[2], softcap is not None, documents is not None)]
        return run(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale, softcap, documents)

    return core


def recomputed(core: Core) -> Core:
    """A core that keeps q, k and v only; the backward pass computes the rest again."""
    return partial(checkpoint, core, use_reentrant=False, preserve_rng_state=False)


def _block_causal(q: Tensor, k: Tensor, v: Tensor, scale: float, cap: None, documents: Documents | None) -> Tensor:
    return block_causal(q, k, v, scale, None if documents is None else documents.begins)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, cap: None = None, documents: None = None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)


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


def _each_alone(q: Tensor, k: Tensor, v: Tensor, scale: float, cap: None, documents: Documents) -> Tensor:
    """One document after the other: long rows, whose mask would be large."""
    rows = [torch.cat([_sdpa(*(x[row:row + 1, :, first:end] for x in (q, k, v)), scale) for first, end in spans], 2)
            for row, spans in enumerate(documents.spans)]
    return torch.cat(rows)


def _flex(q: Tensor, k: Tensor, v: Tensor, scale: float, cap: float | None,
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


PROGRAMS = {
    "flex_attention, compiled": _flex,
    "blocks of queries in plain tensor code": blockwise,
    "blocks of queries that skip what lies ahead": _block_causal,
    "scaled_dot_product_attention": _sdpa,
    "scaled_dot_product_attention of one document after the other": _each_alone,
}
