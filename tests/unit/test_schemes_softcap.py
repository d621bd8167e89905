"""Attention with a soft-cap on its scores: both paths against the formula, with gradients; chosen by the need."""

import math

import pytest
import torch
from decoders import relative

from megnorm.model import core


def formula(q, k, v, scale, cap):
    """cap * tanh(scale q.k / cap) over earlier positions, each key and value head for its queries."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = cap * torch.tanh(torch.einsum("bhie,bhje->bhij", q, k) * scale / cap)
    later = torch.arange(q.shape[2])[:, None] < torch.arange(q.shape[2])
    return scores.masked_fill(later, -torch.inf).softmax(-1) @ v


def inputs(length, heads=4, groups=2, size=8, dtype=torch.float64):
    stream = torch.Generator().manual_seed(length)
    shapes = [(2, heads, length, size), (2, groups, length, size), (2, groups, length, size)]
    return [(2 * torch.randn(shape, generator=stream, dtype=dtype)).requires_grad_() for shape in shapes]


def same(function, tensors, scale, cap, limit):
    y, right = function(*tensors, scale, cap), formula(*tensors, scale, cap)
    direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
    got = torch.autograd.grad(y, tensors, direction)
    expected = torch.autograd.grad(right, tensors, direction)
    for one, other in zip((y, *got), (right, *expected), strict=True):
        assert relative(one, other) < limit


@pytest.mark.parametrize("length", [1, 7, core.ROWS, core.ROWS + 1, 2 * core.ROWS + 19])
def test_blocks_of_queries(length):
    same(core.blockwise, inputs(length), 0.4, 1.5, 1e-12)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_shared_heads(groups):
    same(core.blockwise, inputs(20, groups=groups), 0.4, 1.5, 1e-12)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention(monkeypatch):
    """What runs on CUDA, here uncompiled and in fp32: the cap comes after the scale, the mask after the cap."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    core._compiled.cache_clear()
    q, k, v = (x.detach() for x in inputs(256, size=16, dtype=torch.float32))
    with torch.no_grad():
        assert relative(core._flex(q, k, v, 0.4, 1.5), formula(q, k, v, 0.4, 1.5)) < 1e-5
    core._compiled.cache_clear()


def test_the_core_is_chosen_by_what_the_scores_need():
    q, k, v = inputs(12)
    root = math.sqrt(8)
    for scale in (None, 0.7):
        plain, capped = core.make_core(scale, None), core.make_core(scale, 0.8)
        factor = 1 / root if scale is None else scale
        assert relative(plain(q, k, v), formula(q, k, v, factor, 1e9)) < 1e-6
        assert relative(capped(q, k, v), formula(q, k, v, factor, 0.8)) < 1e-12
        assert relative(capped(q, k, v), plain(q, k, v)) > 0.1
