"""Selectors of layers by number, range and share of the depth."""

import math
import re
from fractions import Fraction

from megnorm.config.base import ConfigError


def select_layers(selector: str, layers: int) -> range:
    """Layers (0-based) named by "3", "-1", "4:8", ":", "first 2", "last 25%" among ``layers``."""
    text = selector.strip()
    if re.fullmatch(r"-?\d+", text):
        number = int(text)
        if not -layers <= number < layers:
            raise ConfigError(
                f"model.norm.overrides: layer {number} is beyond the depth; with layers={layers} "
                f"the numbers go from {-layers} to {layers - 1}"
            )
        return range(number % layers, number % layers + 1)
    if match := re.fullmatch(r"(-?\d*):(-?\d*)", text):
        start, stop, _ = slice(*(int(v) if v else None for v in match.groups())).indices(layers)
        if any(v and not -layers <= int(v) <= layers for v in match.groups()) or start >= stop:
            raise ConfigError(
                f"model.norm.overrides: the range {selector!r} is empty or beyond the depth "
                f"(layers={layers}); numbers go from {-layers} to {layers}"
            )
        return range(start, stop)
    if match := re.fullmatch(r"(first|last)\s+(\d+(?:\.\d+)?)(\s*%)?", text):
        end, amount, percent = match.groups()
        exact = Fraction(amount) * layers / 100 if percent else Fraction(amount)
        count = math.floor(exact)
        if count < 1 or exact > layers or (exact != count and not percent):
            raise ConfigError(
                f"model.norm.overrides: {selector!r} names {float(exact):g} of {layers} layers; "
                f"give a whole number from 1 to {layers}, or a share of the depth in %"
            )
        return range(count) if end == "first" else range(layers - count, layers)
    raise ConfigError(
        f"model.norm.overrides: can't read the layers {selector!r}; "
        'write "3", "-1", "4:8", ":", "first 2" or "last 25%"'
    )
