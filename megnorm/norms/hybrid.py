"""The family of HybridNorm (arXiv:2503.04598): norms of q, k, v and the context c crossed with block frames.

# is a set of letters of q, k, v, c that are normed over each head. Attention reads x, or N(x) in the frames
that begin with Pre. The FFN computes F(N(y)) + N(y) in the frames that end with Post, F(N(y)) + y in those
with Pre.
"""

import math
from collections.abc import Callable

from megnorm.config.base import Section
from megnorm.config.placement import Block
from megnorm.norms.scheme import Place, Scheme, Spec, final_norm, fixed, make_block

PAPER = "arXiv:2503.04598"
SLOTS = {"q": "q_norm", "k": "k_norm", "v": "v_norm", "c": "ctx_norm"}


def frame(letters: str, ffn: str, attention: str = "raw") -> Callable[[Place], Block]:
    """Blocks with the ``letters`` normed; attention: "raw", "pre" or "post"; ffn: "pre" or "post"."""

    def sublayer(at: Place, kind: str) -> dict:
        if kind == "raw":
            return {}
        return {"in_norm": at.n, "residual_from": "normed" if kind == "post" else "raw"}

    def block(at: Place) -> Block:
        heads = {SLOTS[letter]: at.h for letter in letters}
        return make_block({**sublayer(at, attention), **heads}, sublayer(at, ffn))

    return block


hybrid = frame("qkv", "post")


def first_block(first: Callable[[Place], Block]) -> Callable[[Place], Block]:
    """HybridNorm with another first block."""
    return lambda at: (first if at.l == 1 else hybrid)(at)


class StarOptions(Section):
    """attention_out_norm: a norm on attention's output whose gain starts at 1 / sqrt(2 L), as in the paper's
    7B runs."""

    attention_out_norm: bool = False


def hybrid_star(options: StarOptions) -> Spec:
    """HybridNorm after a first block Pre-QKV-Pre."""
    plain = first_block(frame("qkv", "pre", "pre"))
    if not options.attention_out_norm:
        return Spec(plain)

    def block(at: Place) -> Block:
        norm = at.n.model_copy(update={"gain_init": 1 / math.sqrt(2 * at.L)})
        built = plain(at)
        return built.model_copy(update={"attention": built.attention.model_copy(update={"out_norm": norm})})

    return Spec(block)


HYBRID = {
    "qkv_pre": Scheme("q, k, v normed; the FFN pre-norm", PAPER, fixed(frame("qkv", "pre"))),
    "pre_qkv_pre": Scheme("pre-norm with q, k, v normed", PAPER, fixed(frame("qkv", "pre", "pre"))),
    "pre_qkv_post": Scheme(
        "attention pre-norm with q, k, v normed; the FFN's normed input is its residual too",
        PAPER,
        fixed(frame("qkv", "post", "pre")),
    ),
    "pre_post": Scheme(
        "attention pre-norm; the FFN's normed input is its residual too",
        PAPER,
        fixed(frame("", "post", "pre")),
    ),
    "post_pre": Scheme(
        "attention's normed input is its residual too; the FFN pre-norm",
        PAPER,
        fixed(frame("", "pre", "post")),
    ),
    "hybrid": Scheme(
        "q, k, v normed; the FFN's normed input is its residual too (HybridNorm)", PAPER, fixed(hybrid)
    ),
    "hybrid_star": Scheme(
        "HybridNorm with a pre-norm first block (HybridNorm*)", PAPER, hybrid_star, StarOptions
    ),
    "first_qkv_pre": Scheme(
        "HybridNorm with the FFN of the first block pre-norm", PAPER, fixed(first_block(frame("qkv", "pre")))
    ),
    "hybrid_embed_norm": Scheme(
        "HybridNorm on a normed embedding",
        PAPER,
        fixed(hybrid, ends=lambda at: {**final_norm(at), "embed_norm": at.n}),
    ),
    "qkvc_post": Scheme("HybridNorm with the context normed as well", PAPER, fixed(frame("qkvc", "post"))),
    "qkc_post": Scheme("HybridNorm with q, k and the context normed", PAPER, fixed(frame("qkc", "post"))),
    "qk_post": Scheme(
        "HybridNorm with only q and k normed",
        PAPER,
        fixed(frame("qk", "post")),
        needs="care: it diverges in the paper",
    ),
    "kv_post": Scheme("HybridNorm with k and v normed", PAPER, fixed(frame("kv", "post"))),
    "kc_post": Scheme("HybridNorm with k and the context normed", PAPER, fixed(frame("kc", "post"))),
}
