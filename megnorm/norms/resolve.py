"""From what the user says about norms to the block of every layer, by its global number."""

import difflib
import math
import re
from fractions import Fraction
from typing import Any

from pydantic import ValidationError

from megnorm.config.base import ConfigError
from megnorm.config.model import InitPolicy, ModelConfig, NormConfig
from megnorm.config.placement import AttentionSlots, Block, FFNSlots, HeadNorm, Norm, Placement
from megnorm.norms.schemes import SCHEMES


def resolve(norm: NormConfig, layers: int) -> Placement:
    """The norms of a model with ``layers`` blocks. Raises ConfigError for an unknown scheme, slot or layer."""
    if norm.scheme not in SCHEMES:
        near = difflib.get_close_matches(norm.scheme, SCHEMES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(SCHEMES)}"
        raise ConfigError(f"model.norm: unknown scheme {norm.scheme!r}; {hint}")
    scheme = SCHEMES[norm.scheme]
    options = {"kind": norm.kind, "eps": norm.eps, "bias": norm.bias, "rounding": norm.rounding}
    hidden, head = Norm(**options), HeadNorm(**options)
    blocks = [scheme.block(hidden, head, layer, layers) for layer in range(layers)]
    for selector, changes in norm.overrides.items():
        for layer in select_layers(selector, layers):
            blocks[layer] = _override(blocks[layer], changes, options, selector)
    return Placement(embed_norm=hidden if scheme.embed_norm else None, blocks=tuple(blocks),
                     final_norm=hidden if scheme.final_norm else None)


def init_policy(model: ModelConfig) -> InitPolicy:
    """How the matrices of a model start: as the user says, else as the norm scheme's paper does."""
    return model.init.policy or "megatron"


def select_layers(selector: str, layers: int) -> range:
    """Layers (0-based) named by "3", "-1", "4:8", "first 2", "last 25%" among ``layers``."""
    text = selector.strip()
    if re.fullmatch(r"-?\d+", text):
        number = int(text)
        if not -layers <= number < layers:
            raise ConfigError(f"model.norm.overrides: layer {number} is beyond the depth; with layers={layers} "
                              f"the numbers go from {-layers} to {layers - 1}")
        return range(number % layers, number % layers + 1)
    if match := re.fullmatch(r"(-?\d*):(-?\d*)", text):
        start, stop, _ = slice(*(int(v) if v else None for v in match.groups())).indices(layers)
        if any(v and not -layers <= int(v) <= layers for v in match.groups()) or start >= stop:
            raise ConfigError(f"model.norm.overrides: the range {selector!r} is empty or beyond the depth "
                              f"(layers={layers}); numbers go from {-layers} to {layers}")
        return range(start, stop)
    if match := re.fullmatch(r"(first|last)\s+(\d+(?:\.\d+)?)(\s*%)?", text):
        end, amount, percent = match.groups()
        exact = Fraction(amount) * layers / 100 if percent else Fraction(amount)
        count = math.floor(exact)
        if count < 1 or exact > layers or (exact != count and not percent):
            raise ConfigError(f"model.norm.overrides: {selector!r} names {float(exact):g} of {layers} layers; "
                              f"give a whole number from 1 to {layers}, or a share of the depth in %")
        return range(count) if end == "first" else range(layers - count, layers)
    raise ConfigError(f"model.norm.overrides: can't read the layers {selector!r}; "
                      'write "3", "-1", "4:8", "first 2" or "last 25%"')


def _override(block: Block, changes: dict[str, dict[str, Any]], options: dict, selector: str) -> Block:
    """The block with some slots replaced; "default" is the configured norm, "none" an absent slot."""
    parts = {}
    for part, slots in changes.items():
        kind = {"attention": AttentionSlots, "ffn": FFNSlots}[part]
        values = {name: getattr(getattr(block, part), name) for name in kind.model_fields}
        for name, value in slots.items():
            where = f"model.norm.overrides[{selector!r}].{part}.{name}"
            if name not in values:
                near = difflib.get_close_matches(name, values, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(values)}"
                raise ConfigError(f"{where}: unknown slot; {hint}")
            values[name] = _slot_value(name, value, options, where)
        try:
            parts[part] = kind(**values)
        except ValidationError as error:
            item = error.errors()[0]
            where = ".".join(map(str, item["loc"]))
            raise ConfigError(f"model.norm.overrides[{selector!r}].{part}.{where}="
                              f"{item['input']!r}: {item['msg'].lower()}") from None
    return block.model_copy(update=parts)


def _slot_value(name: str, value: Any, options: dict, where: str) -> Any:
    if not name.endswith("_norm"):
        return float(value) if name.endswith("_scale") and isinstance(value, int) else value
    norm = HeadNorm if name in ("q_norm", "k_norm", "v_norm", "ctx_norm") else Norm
    if value in (None, "none"):
        return None
    if value == "default":
        return norm(**options)
    if not isinstance(value, dict):
        raise ConfigError(f"{where}={value!r}: write default, none, or a mapping such as {{kind: layer}}")
    try:
        return norm(**{**options, **value})
    except ValidationError as error:
        item = error.errors()[0]
        raise ConfigError(f"{where}.{'.'.join(map(str, item['loc']))}: {item['msg'].lower()}; "
                          f"a norm has {', '.join(norm.model_fields)}") from None
