"""The decoder: sizes, activation, norm placement, initialisation."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from megnorm.config.base import Section
from megnorm.config.moe import Moe
from megnorm.config.placement import NormKind, Rounding


class NormConfig(Section):
    """``norm: hybrid_star`` in short, or a scheme with options, changed slots and overrides by layer.

    scheme, options: a name of ``megnorm schemes`` and that scheme's own options, as
    ``{scheme: mix_ln, options: {fraction: 0.25}}``; ``custom`` puts no norm anywhere, so that the slots are
    spelled out in what follows.

    kind, eps, bias, gain, zero_centred, alpha_init, rounding: the norm that the scheme puts into its slots,
    see ``placement.Norm``. What is left out is as the scheme prescribes, else RMSNorm with Norm's defaults;
    another kind than the scheme's takes none of its prescriptions.

    backend: what computes the norms (megnorm.model.kernels); the values are the same.

    embed_scale ... final_softcap: the model's own slots, see ``placement.Placement``; "scheme" leaves them.

    overrides: maps a layer selector ("0", "-1", "4:8", ":", "first 2", "last 25%") to slots, as
    ``{attention: {in_norm: default, residual_from: raw}, ffn: {out_norm: none}}``. Later ones win.

    A norm's slot is "default" for the norm that this section describes, "none" for no norm, or a mapping that
    changes the default in that slot; a factor is a number or a mapping.

    resolved: the slots that all this gave, folded (megnorm.norms.saved); written into the run's config.yaml,
    and refused when it no longer agrees with the rest.
    """

    scheme: str = "pre"
    options: dict[str, Any] = {}
    kind: NormKind | None = None
    eps: float | None = Field(None, ge=0)
    bias: bool | None = None
    gain: Literal["vector", "none"] | None = None
    zero_centred: bool | None = None
    alpha_init: float | None = None
    rounding: Rounding | None = None
    backend: Literal["auto", "torch", "apex", "compile"] = "auto"
    embed_scale: Any = "scheme"
    embed_norm: Any = "scheme"
    final_norm: Any = "scheme"
    streams: Literal["scheme", "single", "residual"] = "scheme"
    attention_scale: Any = "scheme"
    attention_softcap: Any = "scheme"
    final_softcap: Any = "scheme"
    overrides: dict[str, dict[Literal["attention", "ffn"], dict[str, Any]]] = {}
    resolved: dict[str, Any] | None = None

    @field_validator("overrides", mode="before")
    @classmethod
    def _selectors_are_text(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        texts = [str(key) for key in value]
        if twice := [text for text in texts if texts.count(text) > 1]:
            raise ValueError(f"the layers {twice[0]!r} stand twice, as a number and as text")
        return dict(zip(texts, value.values(), strict=True))


InitPolicy = Literal["normal", "megatron", "depth_scaled", "deepnorm", "sub_ln"]


class InitConfig(Section):
    """Initial values; without a policy it is the norm scheme's own (megnorm.norms.init_policy).

    normal:       every matrix N(0, std)
    megatron:     output matrices (attention output, FFN down) with std / sqrt(2 L)
    depth_scaled: std 1/sqrt(d); attention output 1/sqrt(2 d l), FFN down 1/sqrt(2 f l) in block l = 1..L
    deepnorm:     Xavier normal; v, attention output and all FFN matrices with gain (8 L)^(-1/4)
    sub_ln:       v, attention output and all FFN matrices times sqrt(ln 2 L)

    std defaults to 1/sqrt(2.5 hidden), embedding_std to std; samples lie within ``cut`` standard deviations.
    """

    policy: InitPolicy | None = None
    std: float | None = Field(None, gt=0)
    embedding_std: float | None = Field(None, gt=0)
    cut: float = Field(3.0, gt=0)


class ModelConfig(Section):
    """A decoder-only transformer. Omitted sizes: kv_heads = heads, head_size = hidden / heads,
    ffn_hidden = 4 hidden (8/3 hidden rounded up to 64 for SwiGLU), vocab_size = the tokenizer's. z_loss:
    weight of (log Z)^2 beside each token's cross entropy (arXiv:2204.02311). moe: experts in place of the FFN,
    in some blocks or all; the others keep an FFN of ffn_hidden. positions: rope turns queries and keys
    (arXiv:2104.09864); with none only the causal mask tells positions apart (arXiv:2305.19466)."""

    layers: int = Field(gt=0)
    hidden: int = Field(gt=0)
    heads: int = Field(gt=0)
    kv_heads: int | None = Field(None, gt=0)
    head_size: int | None = Field(None, gt=0)
    ffn_hidden: int | None = Field(None, gt=0)
    moe: Moe | None = None
    activation: Literal["swiglu", "gelu", "relu2"] = "swiglu"
    bias: bool = False
    vocab_size: int | None = Field(None, gt=0)
    pad_vocab_to: int = Field(128, gt=0)
    tie_embeddings: bool = True
    positions: Literal["rope", "none"] = "rope"
    rope_theta: float = Field(10000.0, gt=0)
    z_loss: float = Field(0.0, ge=0)
    norm: NormConfig = NormConfig()
    init: InitConfig = InitConfig()

    @field_validator("norm", mode="before")
    @classmethod
    def _scheme_in_short(cls, value: Any) -> Any:
        return {"scheme": value} if isinstance(value, str) else value

    @model_validator(mode="before")
    @classmethod
    def _fill_sizes(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        value = dict(value)
        hidden, heads = value.get("hidden"), value.get("heads")
        if isinstance(heads, int) and value.get("kv_heads") is None:
            value["kv_heads"] = heads
        if isinstance(heads, int) and heads > 0 and isinstance(hidden, int):
            if value.get("head_size") is None:
                if hidden % heads:
                    raise ValueError(f"hidden={hidden} is not divisible by heads={heads}: "
                                     "change one of them, or give head_size")
                value["head_size"] = hidden // heads
            if value.get("ffn_hidden") is None:
                gated = value.get("activation", "swiglu") == "swiglu"
                value["ffn_hidden"] = -(-8 * hidden // 3 // 64) * 64 if gated else 4 * hidden
        return value

    @model_validator(mode="after")
    def _heads_fit(self) -> "ModelConfig":
        if self.heads % self.kv_heads:
            divisors = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            raise ValueError(f"heads={self.heads} is not divisible by kv_heads={self.kv_heads}: "
                             f"kv_heads may be one of {divisors}")
        if self.head_size % 2 and self.positions == "rope":
            raise ValueError(f"head_size={self.head_size} is odd: rotary positions turn pairs of channels")
        return self

    @model_validator(mode="after")
    def _some_layer_has_experts(self) -> "ModelConfig":
        if self.moe is not None and not self.moe_layers:
            raise ValueError(f"moe.layers={self.moe.layers!r} leaves no block with experts among layers={self.layers}: "
                             "take a smaller number, or no moe")
        return self

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Global numbers, from 0, of the blocks whose FFN is a mixture of experts."""
        return () if self.moe is None else self.moe.blocks(self.layers)

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding: the vocabulary rounded up to ``pad_vocab_to``; the same for every layout."""
        return -(-self.vocab_size // self.pad_vocab_to) * self.pad_vocab_to
