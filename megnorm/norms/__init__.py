"""Norm placement as data: named schemes, the block of every layer, its equations as text. No torch."""

from megnorm.norms.equations import equations
from megnorm.norms.resolve import init_policy, resolve, select_layers
from megnorm.norms.schemes import SCHEMES

__all__ = ["SCHEMES", "equations", "init_policy", "resolve", "select_layers"]
