"""Where norms stand, as data: the slots of a sublayer (norm-placement vocabulary of the whole system).

One sublayer, attention or FFN, computes

    h = in_norm(x)
    r = h if residual_from is "normed" else x
    x = post_norm(residual_scale * r + branch_scale * out_norm(body(h)))

and an absent slot is the identity.
"""

from typing import Literal

from pydantic import Field

from megnorm.config.base import Section

NormKind = Literal["rms", "layer"]
Rounding = Literal["gain_then_cast", "cast_then_gain"]


class Norm(Section):
    """One norm: y = gain * x / sqrt(mean(x^2) + eps)  (rms), or of the centred input, plus bias  (layer).

    ``rounding`` says where a bf16 result is rounded: the gain multiplies in fp32 before the cast
    (torch's rms_norm, OLMo 2, Gemma), or after the cast (Llama, HybridNorm's OLMo code).
    """

    kind: NormKind = "rms"
    eps: float = Field(1e-5, ge=0)
    bias: bool = False
    gain_init: float = 1.0
    rounding: Rounding = "gain_then_cast"


class HeadNorm(Norm):
    """A norm of queries, keys, values or the context; ``head``: over one head, gain shared by the heads
    (Qwen3, HybridNorm); ``all_heads``: over the heads together, one gain per channel (OLMo 2)."""

    scope: Literal["head", "all_heads"] = "head"


class Sublayer(Section):
    """Slots that attention and FFN share."""

    in_norm: Norm | None = None
    residual_from: Literal["raw", "normed"] = "raw"
    out_norm: Norm | None = None
    residual_scale: float = 1.0
    branch_scale: float = 1.0
    post_norm: Norm | None = None


class AttentionSlots(Sublayer):
    """q, k, v: after the projection and before the rotation; ctx: before the output projection."""

    q_norm: HeadNorm | None = None
    k_norm: HeadNorm | None = None
    v_norm: HeadNorm | None = None
    ctx_norm: HeadNorm | None = None


class FFNSlots(Sublayer):
    """mid: over the inner width, on the input of the down projection (for SwiGLU the gated product)."""

    mid_norm: Norm | None = None


class Block(Section):
    """One transformer block: where its norms stand."""

    attention: AttentionSlots = AttentionSlots()
    ffn: FFNSlots = FFNSlots()


class Placement(Section):
    """The norms of a whole model; ``blocks[l]`` belongs to the block with global number l."""

    embed_norm: Norm | None = None
    blocks: tuple[Block, ...]
    final_norm: Norm | None = None
