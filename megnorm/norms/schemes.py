"""Named norm schemes: each is a function from (norm, head norm, layer, depth) to the block of that layer."""

from collections.abc import Callable
from typing import NamedTuple

from megnorm.config.placement import AttentionSlots, Block, FFNSlots, HeadNorm, Norm


class Scheme(NamedTuple):
    """A scheme: one line on it, its source, the block of layer l (0-based) of L, the model-level norms."""

    summary: str
    source: str
    block: Callable[[Norm, HeadNorm, int, int], Block]
    final_norm: bool = True
    embed_norm: bool = False


def _pre(n: Norm, h: HeadNorm, l: int, L: int) -> Block:
    return Block(attention=AttentionSlots(in_norm=n), ffn=FFNSlots(in_norm=n))


def _post(n: Norm, h: HeadNorm, l: int, L: int) -> Block:
    return Block(attention=AttentionSlots(post_norm=n), ffn=FFNSlots(post_norm=n))


def _peri(n: Norm, h: HeadNorm, l: int, L: int) -> Block:
    return Block(attention=AttentionSlots(in_norm=n, out_norm=n), ffn=FFNSlots(in_norm=n, out_norm=n))


def _hybrid(n: Norm, h: HeadNorm, l: int, L: int) -> Block:
    return Block(attention=AttentionSlots(q_norm=h, k_norm=h, v_norm=h),
                 ffn=FFNSlots(in_norm=n, residual_from="normed"))


def _hybrid_star(n: Norm, h: HeadNorm, l: int, L: int) -> Block:
    if l > 0:
        return _hybrid(n, h, l, L)
    return Block(attention=AttentionSlots(in_norm=n, q_norm=h, k_norm=h, v_norm=h), ffn=FFNSlots(in_norm=n))


SCHEMES: dict[str, Scheme] = {
    "pre": Scheme("norm before each sublayer, final norm (GPT-2, LLaMA)", "arXiv:2002.04745", _pre),
    "post": Scheme("norm after each residual addition, no final norm (the original Transformer)",
                   "arXiv:1706.03762", _post, final_norm=False),
    "peri": Scheme("norm before and after each sublayer, final norm (Peri-LN, sandwich)", "arXiv:2502.02732", _peri),
    "hybrid": Scheme("q, k, v norms per head in attention; the FFN's normed input feeds its residual too",
                     "arXiv:2503.04598", _hybrid),
    "hybrid_star": Scheme("HybridNorm, with a pre-norm first block (HybridNorm*)", "arXiv:2503.04598", _hybrid_star),
}
