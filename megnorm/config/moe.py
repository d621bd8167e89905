"""A mixture of experts in place of a block's FFN."""

import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from megnorm.config.base import Section

ROUTED = re.compile(r"all|first dense (\d+)|every (\d+)")
BY_BALANCE = ("aux_weight", "bias_rate")  # read differently by each way of balancing

# What each model's own configuration says of its routing; sizes follow from the model. Its weight of the balance
# loss is multiplied by top_k where its loss is top_k times ours: transformers' load_balancing_loss_func.
PRESETS: dict[str, dict[str, Any]] = {
    "olmoe": {"experts": 64, "top_k": 8, "aux_weight": 0.01, "z_weight": 0.001},  # arXiv:2409.02060
    "mixtral": {"experts": 8, "top_k": 2, "normalise_top_k": True, "aux_weight": 2 * 0.02, "z_weight": 0.0},
    "qwen3_moe": {"experts": 128, "top_k": 8, "normalise_top_k": True, "aux_weight": 8 * 0.001, "z_weight": 0.0},
    "deepseek_v3": {"experts": 256, "top_k": 8, "groups": 8, "top_groups": 4, "router": "sigmoid",  # arXiv:2412.19437
                    "normalise_top_k": True, "routed_scale": 2.5, "shared_experts": 1, "balance": "bias",
                    "bias_rate": 0.001, "aux_weight": 0.0001, "z_weight": 0.0},
}


class Moe(Section):
    """y = sum over the top_k experts e of a token of g_e FFN_e(x), plus shared experts that take every token.

    preset: values of a published model for what is left out here. ffn_hidden: inner width of one expert, shared
    ones included. layers: "all" blocks; "first dense k": all but the first k; "every n": blocks n, 2n, ... from 1.

    router: scores s of a token are softmax or sigmoid of its logits; the experts with the highest scores are
    chosen, and g_e = routed_scale s_e, with s_e divided by the sum over those chosen under normalise_top_k.
    groups: experts stand in so many groups, and a token chooses among those of its top_groups best groups, the ones
    whose two highest scores have the largest sum.

    balance: aux and sequence are losses with weight aux_weight, see megnorm.model.router; bias chooses by
    s_e + b_e, where after each step b_e grows or shrinks by bias_rate for an expert that got less or more than the
    mean (arXiv:2408.15664), and an aux_weight above 0 adds the loss of sequence to that. z_weight: of the mean of
    logsumexp(logits)^2 (arXiv:2202.08906). Both losses are means over the layers with experts: a weight that is meant
    for their sum over layers is to be multiplied by their number.

    capacity: c lets each expert take the first c top_k s / experts tokens, rounded up, of a sequence of s, and
    drops the rest; "none" drops nothing.
    """

    preset: Literal["olmoe", "mixtral", "qwen3_moe", "deepseek_v3"] | None = None
    experts: int = Field(gt=0)
    top_k: int = Field(gt=0)
    groups: int = Field(1, gt=0)
    top_groups: int = Field(1, gt=0)
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
        preset = PRESETS.get(str(value.get("preset")), {})
        filled = {**preset, **value}
        balance = filled.get("balance", "aux")
        if balance != preset.get("balance", "aux"):  # its weights are meant for its own way
            filled = {name: given for name, given in filled.items() if name in value or name not in BY_BALANCE}
        defaults = {"aux_weight": {"aux": 0.01, "sequence": 0.01, "bias": 0.0}, "bias_rate": {"bias": 0.001}}
        for name, by_balance in defaults.items():
            if balance in by_balance:
                filled.setdefault(name, by_balance[balance])
            elif filled.get(name):
                raise ValueError(f"{name}={value[name]} has no meaning with balance={balance}: leave it out, or take "
                                 f"balance={' or '.join(by_balance)}")
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

    @model_validator(mode="after")
    def _fitting_groups(self) -> "Moe":
        size, left = divmod(self.experts, self.groups)
        if left or (self.groups > 1 and size < 2):
            fitting = [n for n in range(1, self.experts // 2 + 1) if self.experts % n == 0]
            raise ValueError(f"groups={self.groups} doesn't cut experts={self.experts} into equal groups of at least "
                             f"2: groups may be {', '.join(map(str, fitting)) or '1'}")
        if self.top_groups > self.groups or self.top_k > self.top_groups * size:
            raise ValueError(f"top_groups={self.top_groups} of groups={self.groups} must hold top_k={self.top_k} "
                             f"experts ({size} a group): it may be {-(-self.top_k // size)} to {self.groups}")
        return self

    @property
    def by_sequence(self) -> bool:
        """Whether the balance loss looks at each sequence by itself."""
        return self.balance in ("sequence", "bias")

    def blocks(self, depth: int) -> tuple[int, ...]:
        """Global numbers, from 0, of the blocks that have experts."""
        dense, every = ROUTED.fullmatch(self.layers).groups()
        return tuple(range(int(every) - 1, depth, int(every)) if every else range(int(dense or 0), depth))
