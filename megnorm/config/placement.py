"""Where norms stand, as data: the slots of a sublayer and of a model.

One sublayer, attention or FFN, computes

    h = in_norm(x)
    r = h if residual_from is "normed" else x
    x = post_norm(residual_scale * r + branch_scale * out_norm(body(h)))

and an absent slot is the identity. All values here are resolved: rules of the layer number and the depth have
been evaluated on global numbers (see megnorm.norms).
"""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from megnorm.config.base import Section

NormKind = Literal["rms", "layer", "l2", "dyt"]
Rounding = Literal["gain_then_cast", "cast_then_gain"]


class Norm(Section):
    """One norm over n channels x, statistics in fp32.

    rms:   gain * x / sqrt(mean(x^2) + eps) + bias        (arXiv:1910.07467)
    layer: the same of the centred input                  (arXiv:1607.06450)
    l2:    gain * x / sqrt(sum(x^2) + eps) + bias
    dyt:   gain * tanh(alpha x) + bias, alpha learned     (arXiv:2503.10622; takes no statistic)

    gain: "vector", one per channel, or "none". gain_init: the gain's first value. zero_centred: the stored
    parameter is gain - 1, so that weight decay pulls the gain to 1. scale: constant factor on the output.
    rounding: where a bf16 result is rounded: the gain multiplies in fp32 before the cast (torch's rms_norm,
    OLMo 2, Gemma), or after the cast (Llama, HybridNorm's OLMo code).
    """

    kind: NormKind = "rms"
    eps: float = Field(1e-5, ge=0)
    bias: bool = False
    gain: Literal["vector", "none"] = "vector"
    gain_init: float = 1.0
    zero_centred: bool = False
    scale: float = 1.0
    alpha_init: float = 0.5
    rounding: Rounding = "gain_then_cast"


class HeadNorm(Norm):
    """A norm of queries, keys, values or the context.

    scope ``head``: over one head (Qwen3, HybridNorm), the gain "vector" shared by the heads or one "per_head"
    (Cohere). ``all_heads``: over the heads together, one gain per channel (OLMo 2). rope: before or after the
    rotation, for q and k.
    """

    scope: Literal["head", "all_heads"] = "head"
    gain: Literal["vector", "per_head", "none"] = "vector"
    rope: Literal["before", "after"] = "before"

    @model_validator(mode="after")
    def _gain_fits_the_scope(self) -> "HeadNorm":
        if self.gain == "per_head" and self.scope == "all_heads":
            raise ValueError("gain=per_head needs scope=head; over all heads the gain is one per channel (vector)")
        return self


class Scale(Section):
    """A factor: the constant ``value``, or a learned scalar or vector over channels that starts there.

    ramp_steps: the factor grows from 0, as min(t / ramp_steps, 1) * value in training step t = 1, 2, ...
    (ProRes, arXiv:2603.05369). profiled: a learned factor w of the residual that starts, instead of at
    ``value``, from the first global batch (Admin, arXiv:2004.08249): w_1 = 1 in the model's first sublayer,
    w_{s+1} = sqrt(Var(w_s x_s) + Var(f_s)) with the residual x_s and the branch f_s of sublayer s.
    """

    value: float = 1.0
    learned: Literal["no", "scalar", "vector"] = "no"
    ramp_steps: int = Field(0, ge=0)
    profiled: bool = False

    @model_validator(mode="after")
    def _profile_is_learned(self) -> "Scale":
        if self.profiled and self.learned == "no":
            raise ValueError("profiled=true needs learned: scalar or vector")
        return self


def _not_profiled(scale: Scale) -> Scale:
    if scale.profiled:
        raise ValueError("profiled=true is for residual_scale: the first batch measures factors of the residual")
    return scale


def _as_scale(value: Any) -> Any:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return {"value": float(value)} if number else value


class Sublayer(Section):
    """Slots that attention and FFN share."""

    in_norm: Norm | None = None
    residual_from: Literal["raw", "normed"] = "raw"
    out_norm: Norm | None = None
    residual_scale: Scale = Scale()
    branch_scale: Scale = Scale()
    post_norm: Norm | None = None

    @field_validator("residual_scale", "branch_scale", mode="before")
    @classmethod
    def _number_is_constant(cls, value: Any) -> Any:
        return _as_scale(value)

    @field_validator("branch_scale")
    @classmethod
    def _branch_is_not_profiled(cls, scale: Scale) -> Scale:
        return _not_profiled(scale)


class AttentionSlots(Sublayer):
    """q, k, v: after the projection; ctx: before the output projection.

    head_scale: a learned factor per head, "before" the output projection (NormFormer's paper) or "after" it,
    on contiguous chunks of the projected vector (its released code). gate: the context times
    sigmoid(W_g x), one gate per "head" or per "element" (arXiv:2505.06708).
    """

    q_norm: HeadNorm | None = None
    k_norm: HeadNorm | None = None
    v_norm: HeadNorm | None = None
    ctx_norm: HeadNorm | None = None
    head_scale: Literal["none", "before", "after"] = "none"
    gate: Literal["none", "head", "element"] = "none"

    @field_validator("v_norm", "ctx_norm")
    @classmethod
    def _not_turned(cls, norm: HeadNorm | None) -> HeadNorm | None:
        if norm is not None and norm.rope == "after":
            raise ValueError("rope=after is for q and k: values and the context are not rotated")
        return norm


class FFNSlots(Sublayer):
    """mid: over the inner width, on the input of the down projection (for SwiGLU the gated product)."""

    mid_norm: Norm | None = None


class Block(Section):
    """One transformer block: where its norms stand."""

    attention: AttentionSlots = AttentionSlots()
    ffn: FFNSlots = FFNSlots()


class Placement(Section):
    """The norms of a whole model; ``blocks[l]`` belongs to the block with global number l.

    The blocks read x = embed_norm(embed_scale * embedding). streams "residual" (ResiDual, arXiv:2304.14802):
    beside x, y is carried, which starts as x and adds up all branches (branch_scale * out_norm(body(h))); the
    output reads x + final_norm(y). Soft-caps: cap * tanh(scores / cap), on scaled attention scores before the
    mask, on final logits. attention_scale: factor on the scores, 1 / sqrt(head size) when None.
    """

    embed_scale: Scale = Scale()
    embed_norm: Norm | None = None
    blocks: tuple[Block, ...]
    final_norm: Norm | None = None
    streams: Literal["single", "residual"] = "single"
    attention_scale: float | None = None
    attention_softcap: float | None = Field(None, gt=0)
    final_softcap: float | None = Field(None, gt=0)

    @field_validator("embed_scale", mode="before")
    @classmethod
    def _number_is_constant(cls, value: Any) -> Any:
        return _as_scale(value)

    @field_validator("embed_scale")
    @classmethod
    def _embedding_is_not_profiled(cls, scale: Scale) -> Scale:
        return _not_profiled(scale)
