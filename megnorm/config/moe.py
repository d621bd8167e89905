"""A mixture of experts in place of a block's FFN."""

import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from megnorm.config.base import Section

ROUTED = re.compile(r"all|first dense (\d+)|every (\d+)")
BALANCED_BY_LOSS = ("aux", "sequence")

# What each model's own configuration says of its routing; sizes follow from the model. Its weight of the balance
# loss is multiplied by top_k where its loss is top_k times ours: transformers' load_balancing_loss_func.
PRESETS: dict[str, dict[str, Any]] = {
    "olmoe": {"experts": 64, "top_k": 8, "aux_weight": 0.01, "z_weight": 0.001},  # arXiv:2409.02060
    "mixtral": {"experts": 8, "top_k": 2, "normalise_top_k": True, "aux_weight": 2 * 0.02, "z_weight": 0.0},
    "qwen3_moe": {"experts": 128, "top_k": 8, "normalise_top_k": True, "aux_weight": 8 * 0.001, "z_weight": 0.0},
    # Less its choice among groups of experts, and its second balance loss (weight 1e-4) beside the bias.
    "deepseek_v3": {"experts": 256, "top_k": 8, "router": "sigmoid", "normalise_top_k": True, "routed_scale": 2.5,
                    "shared_experts": 1, "balance": "bias", "bias_rate": 0.001, "z_weight": 0.0},  # arXiv:2412.19437
}


class Moe(Section):
    """y = sum over the top_k experts e of a token of g_e FFN_e(x), plus shared experts that take every token.

    preset: values of a published model for what is left out here. ffn_hidden: inner width of one expert, shared
    ones included. layers: "all" blocks; "first dense k": all but the first k; "every n": blocks n, 2n, ... from 1.

    router: scores s of a token are softmax or sigmoid of its logits; the experts with the highest scores are
    chosen, and g_e = routed_scale s_e, with s_e divided by the sum over those chosen under normalise_top_k.

    balance: aux and sequence are losses with weight aux_weight, see megnorm.model.router; bias chooses by
    s_e + b_e, where after each step b_e grows or shrinks by bias_rate for an expert that got less or more than the
    mean (arXiv:2408.15664). z_weight: of the mean of logsumexp(logits)^2 (arXiv:2202.08906). Both losses are means
    over the layers with experts: a weight that is meant for their sum over layers is to be multiplied by their number.

    capacity: c lets each expert take the first c top_k s / experts tokens, rounded up, of a sequence of s, and
    drops the rest; "none" drops nothing.
    """

    preset: Literal["olmoe", "mixtral", "qwen3_moe", "deepseek_v3"] | None = None
    experts: int = Field(gt=0)
    top_k: int = Field(gt=0)
    ffn_hidden: int = Field(gt=0)
    shared_experts: int = Field(0, ge=0)
    router: Literal["softmax", "sigmoid"] = "softmax"
    normalise_top_k: bool = False
    routed_scale: float = Field(1.0, gt=0)
    balance: Literal["aux", "sequence", "bias", "none"] = "aux"
    aux_weight: float = Field(0.0, ge=0)
    z_weight: float = Field(0.001, ge=0)
    bias_rate: float = Field(0.0, ge=0)
    capacity: float | None = Field(None, gt=0)
    layers: str = "all"

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, value: Any) -> Any:
        """The preset's values; then those that only one way of balancing reads."""
        if not isinstance(value, dict):
            return value
        filled = {**PRESETS.get(str(value.get("preset")), {}), **value}
        balance = filled.get("balance", "aux")
        reads = {"aux_weight": (balance in BALANCED_BY_LOSS, 0.01), "bias_rate": (balance == "bias", 0.001)}
        for name, (read, default) in reads.items():
            if read:
                filled.setdefault(name, default)
            elif name not in value:
                filled.pop(name, None)
            elif value[name]:
                raise ValueError(f"{name}={value[name]} has no meaning with balance={balance}: leave it out, or take "
                                 f"balance={'bias' if name == 'bias_rate' else 'aux or sequence'}")
        return filled

    @field_validator("capacity", mode="before")
    @classmethod
    def _no_capacity(cls, value: Any) -> Any:
        return None if value == "none" else value

    @field_validator("layers")
    @classmethod
    def _known_layers(cls, value: str) -> str:
        match = ROUTED.fullmatch(value)
        if match is None or "0" in match.groups():
            raise ValueError(f'layers={value!r}: write "all", "first dense K" or "every N", with K and N above 0')
        return value

    @model_validator(mode="after")
    def _enough_experts(self) -> "Moe":
        if self.top_k > self.experts:
            raise ValueError(f"top_k={self.top_k} is more than experts={self.experts}: a token goes to each expert at "
                             f"most once, so top_k may be 1 to {self.experts}")
        return self

    def blocks(self, depth: int) -> tuple[int, ...]:
        """Global numbers, from 0, of the blocks that have experts."""
        dense, every = ROUTED.fullmatch(self.layers).groups()
        return tuple(range(int(every) - 1, depth, int(every)) if every else range(int(dense or 0), depth))
