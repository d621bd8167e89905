"""Schemes by where norms stand: before, after, around a sublayer, on queries and keys, inside it.

l = 1..L is the number of a block, N a norm with its own gain, A attention, F the FFN.
"""

import math
from fractions import Fraction
from typing import Literal

from pydantic import Field

from megnorm.config.base import Section
from megnorm.config.placement import Block, Scale
from megnorm.norms.scheme import Place, Scheme, Spec, final_norm, fixed, make_block, no_final_norm

LAYER_NORM = {"kind": "layer", "bias": True}


def pre(at: Place) -> Block:
    """x + F(N(x))."""
    return make_block({"in_norm": at.n}, {"in_norm": at.n})


def post(at: Place) -> Block:
    """N(x + F(x))."""
    return make_block({"post_norm": at.n}, {"post_norm": at.n})


def post_shifted(at: Place) -> Block:
    """N(x) + F(N(x)): post-norm with each norm moved to the front of the next sublayer."""
    slots = {"in_norm": at.n, "residual_from": "normed"}
    return make_block(slots, slots)


def peri(at: Place) -> Block:
    """x + N(F(N(x)))."""
    return make_block({"in_norm": at.n, "out_norm": at.n}, {"in_norm": at.n, "out_norm": at.n})


def qk(at: Place) -> Block:
    """Pre-norm with queries and keys normed over each head."""
    return make_block({"in_norm": at.n, "q_norm": at.h, "k_norm": at.h}, {"in_norm": at.n})


def qk_all_heads(at: Place) -> Block:
    """Pre-norm with queries and keys normed over all heads."""
    return make_block({"in_norm": at.n, "q_norm": at.a, "k_norm": at.a}, {"in_norm": at.n})


class OutputOptions(Section):
    """qk: queries and keys normed over all heads (OLMo 2, 3), over each head (EXAONE 4), or not."""

    qk: Literal["all_heads", "head", "none"] = "all_heads"


def output(options: OutputOptions) -> Spec:
    """x + N(F(x))."""

    def block(at: Place) -> Block:
        heads = {"all_heads": at.a, "head": at.h, "none": None}[options.qk]
        return make_block({"q_norm": heads, "k_norm": heads, "out_norm": at.n}, {"out_norm": at.n})

    return Spec(block, init="normal")


class MixOptions(Section):
    """fraction: share of the depth, from the front, that is post-norm."""

    fraction: float = Field(0.25, ge=0, le=1)


def mix_ln(options: MixOptions) -> Spec:
    """Post-norm for l <= floor(fraction L), pre-norm after."""
    share = Fraction(str(options.fraction))
    return Spec(lambda at: (post if at.l <= math.floor(share * at.L) else pre)(at), init="normal")


class NormFormerOptions(Section):
    """resscale: a learned vector on the FFN's residual. head_scale: before the output projection, as in the
    paper, or after it, as in the released code."""

    resscale: bool = False
    head_scale: Literal["before", "after"] = "before"


def normformer(options: NormFormerOptions) -> Spec:
    """x + N(HeadScale(A(N(x)))), then [lambda *] x + F(N(x)) with a norm on the down projection's input."""
    scale = Scale(learned="vector") if options.resscale else Scale()

    def block(at: Place) -> Block:
        return make_block(
            {"in_norm": at.n, "head_scale": options.head_scale, "out_norm": at.n},
            {"in_norm": at.n, "mid_norm": at.n, "residual_scale": scale},
        )

    return Spec(block, norm=LAYER_NORM)


def sub_ln(at: Place) -> Block:
    """Pre-norm with norms on the inputs of the output and of the down projection."""
    return make_block({"in_norm": at.n, "ctx_norm": at.a}, {"in_norm": at.n, "mid_norm": at.n})


class DyTOptions(Section):
    """attention_alpha: first value of alpha before attention; elsewhere it is model.norm.alpha_init. LLaMA 7B
    in the paper's code: 0.8 here, 0.2 elsewhere."""

    attention_alpha: float | None = None


def dyt(options: DyTOptions) -> Spec:
    """Pre-norm with gain * tanh(alpha x) + bias in place of the norms; a learned factor on the embedding."""
    own = {} if options.attention_alpha is None else {"alpha_init": options.attention_alpha}

    def ends(at: Place) -> dict:
        return {**final_norm(at), "embed_scale": Scale(value=at.sqrt_d, learned="scalar")}

    return Spec(
        lambda at: make_block({"in_norm": at.n.model_copy(update=own)}, {"in_norm": at.n}),
        ends,
        norm={"kind": "dyt"},
        head={"kind": "rms"},
    )


def two_streams(at: Place) -> dict:
    """The second stream carries the sum of all branches and has the final norm."""
    return {"streams": "residual", "final_norm": at.n}


CLASSIC = {
    "post": Scheme(
        "norm after each residual addition (the original Transformer)",
        "arXiv:1706.03762",
        fixed(post, ends=no_final_norm),
        needs="warm-up; no final norm",
    ),
    "post_shifted": Scheme(
        "post-norm as HybridNorm's flags build it: each norm feeds its sublayer and the residual",
        "arXiv:2503.04598",
        fixed(post_shifted),
        needs="warm-up",
    ),
    "pre": Scheme("norm before each sublayer (GPT-2, LLaMA)", "arXiv:2002.04745", fixed(pre)),
    "peri": Scheme(
        "norm before and after each sublayer (Peri-LN; Sandwich-LN, arXiv:2105.13290)",
        "arXiv:2502.02732",
        fixed(peri, init="normal"),
        aliases=("sandwich", "double"),
    ),
    "output": Scheme(
        "norm on each sublayer's output, q and k normed over all heads (OLMo 2)",
        "arXiv:2501.00656",
        output,
        OutputOptions,
    ),
    "qk": Scheme("pre-norm, q and k normed over each head", "arXiv:2010.04245", fixed(qk)),
    "qk_all_heads": Scheme(
        "pre-norm, q and k normed over all heads together (OLMoE)",
        "arXiv:2409.02060",
        fixed(qk_all_heads),
        needs="a sum over tensor-parallel ranks for each norm of q and k",
    ),
    "mix_ln": Scheme(
        "post-norm in the first layers, pre-norm in the others", "arXiv:2412.13795", mix_ln, MixOptions
    ),
    "normformer": Scheme(
        "pre-norm, factors per head, norms on attention's output and on the FFN's inner activations",
        "arXiv:2110.09456",
        normformer,
        NormFormerOptions,
        needs="LayerNorm, unless kind is given",
    ),
    "sub_ln": Scheme(
        "pre-norm, norms before the output and the down projection (Magneto, BitNet b1.58)",
        "arXiv:2210.06423",
        fixed(sub_ln, norm=LAYER_NORM, init="sub_ln"),
        needs="LayerNorm, unless kind is given",
    ),
    "residual": Scheme(
        "post-norm, beside it a stream of raw sums that is normed at the end (ResiDual)",
        "arXiv:2304.14802",
        fixed(post, ends=two_streams, norm=LAYER_NORM, init="normal"),
        needs="two tensors between pipeline stages; LayerNorm, unless kind is given",
    ),
    "dyt": Scheme(
        "pre-norm with tanh(alpha x) in place of norms, learned factor on the embedding",
        "arXiv:2503.10622",
        dyt,
        DyTOptions,
        needs="alpha_init chosen by width",
    ),
}
