"""Norm placement as data: named schemes, the block of every layer, its equations as text. No torch."""

from megnorm.norms.equations import equations, norm_kinds
from megnorm.norms.fold import fold
from megnorm.norms.layers import select_layers
from megnorm.norms.resolve import init_policy, placement_of, resolve, with_placement
from megnorm.norms.saved import read_placement, save_placement
from megnorm.norms.schemes import SCHEMES, find_scheme

__all__ = [
    "SCHEMES",
    "equations",
    "find_scheme",
    "fold",
    "init_policy",
    "norm_kinds",
    "placement_of",
    "read_placement",
    "resolve",
    "save_placement",
    "select_layers",
    "with_placement",
]
