"""Norm modules: values to the bit in the stated order of rounding, statistics in fp32, gradients, layouts
of the input in memory."""

import itertools

import pytest
import torch
from decoders import relative

from megnorm.config.placement import HeadNorm, Norm
from megnorm.model.norm import LocalNorm, SpanningNorm, heads_norm, hidden_norm, inner_norm
from megnorm.parallel.tensor import Alone

MODULES = [LocalNorm, SpanningNorm]
KINDS = [Norm(kind=kind, rounding=rounding, bias=bias) for kind, rounding, bias in itertools.product(
    ("rms", "layer"), ("gain_then_cast", "cast_then_gain"), (False, True))]
ids = [f"{n.kind}-{n.rounding}-{'bias' if n.bias else 'plain'}" for n in KINDS]
every_norm = pytest.mark.parametrize("norm", KINDS, ids=ids)
both_modules = pytest.mark.parametrize("module", MODULES)


def made(module, norm, width, dtype):
    stream = torch.Generator().manual_seed(1)
    built = module("n", norm, width, tp=Alone()).to(dtype)
    with torch.no_grad():
        built.gain.copy_(1 + 0.1 * torch.randn(width, generator=stream))
        if norm.bias:
            built.bias.copy_(0.3 * torch.randn(width, generator=stream))
    return built


def reference(x, gain, bias, norm, rounding, factor=1.0):
    """In fp64 up to the first rounding that the order states; ``factor`` shifts what is rounded there."""
    wide = x.double()
    if norm.kind == "layer":
        wide = wide - wide.mean(-1, keepdim=True)
    wide = factor * wide / (wide.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt()
    if rounding == "cast_then_gain":
        y = wide.to(x.dtype) * gain
        return y if bias is None else y + bias
    y = wide * gain.double()
    return (y if bias is None else y + bias.double()).to(x.dtype)


@every_norm
@both_modules
@pytest.mark.parametrize("size", [1.0, 3e-3])  # the small one is of the order of eps
def test_bf16_is_rounded_in_the_stated_order(module, norm, size):
    built = made(module, norm, 512, torch.bfloat16)
    x = (size * torch.randn(16, 512, generator=torch.Generator().manual_seed(2))).bfloat16()
    y = built(x)
    # fp32 and fp64 may round apart only where a value lies on the border between two bf16 numbers
    low, high = (reference(x, built.gain, built.bias, norm, norm.rounding, f) for f in (1 - 5e-7, 1 + 5e-7))
    assert y.dtype == torch.bfloat16
    assert bool(((y == low) | (y == high)).all())
    assert int((low != high).sum()) < 20
    other = {"gain_then_cast": "cast_then_gain", "cast_then_gain": "gain_then_cast"}[norm.rounding]
    assert int((y != reference(x, built.gain, built.bias, norm, other)).sum()) > 100


@every_norm
@both_modules
def test_statistics_are_taken_in_fp32(module, norm):
    """One element of 300 among 0.01: in bf16 the sum of squares forgets the small ones' share of a mean."""
    built = made(module, norm, 4096, torch.bfloat16)
    x = torch.full((4096,), 0.01)
    x[17] = 300.0
    x = x.bfloat16()
    right = reference(x, built.gain, built.bias, norm, "gain_then_cast").double()
    size = right.abs() if built.bias is None else right.abs() + built.bias.abs()
    assert bool((built(x).double() - right).abs().le(size * 2 ** -7 + 1e-6).all())


@both_modules
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_many_equal_squares_are_summed_in_fp32(module, kind):
    """4096 values of alternate sign: a sum in bf16 stops growing at 256."""
    built = made(module, Norm(kind=kind), 4096, torch.bfloat16)
    x = torch.tensor([1.0, -1.0]).repeat(2048).bfloat16()
    assert torch.equal(built(x), (x.float() * built.gain.float() / (1 + 1e-5) ** 0.5).bfloat16())


@both_modules
def test_a_large_mean_keeps_its_spread(module):
    """fp32, mean 1000 and spread 1: a one-pass variance loses it."""
    built = made(module, Norm(kind="layer", bias=True), 4096, torch.float32)
    x = 1000 + torch.randn(8, 4096, generator=torch.Generator().manual_seed(3))
    right = reference(x.double(), built.gain, built.bias, built.norm, "gain_then_cast")
    assert (built(x).double() - right).abs().max() < 5e-4


@every_norm
@both_modules
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-5),
                                              (torch.bfloat16, 2e-2)])
def test_gradients(module, norm, dtype, limit):
    built = made(module, norm, 32, dtype)
    stream = torch.Generator().manual_seed(4)
    x = torch.randn(5, 7, 32, generator=stream).to(dtype).requires_grad_()
    direction = torch.randn(5, 7, 32, generator=stream).to(dtype)
    leaves = [x, built.gain] + ([built.bias] if norm.bias else [])
    got = torch.autograd.grad(built(x), leaves, direction)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    y = reference(wide[0], wide[1], wide[2] if norm.bias else None, norm, "gain_then_cast")
    for mine, right in zip(got, torch.autograd.grad(y, wide, direction.double()), strict=True):
        assert mine.dtype == dtype
        assert relative(mine.double(), right) < limit


LAYOUTS = {
    "slice of a wider row": lambda x: torch.cat((x, x), -1)[..., :32],
    "every other element": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "batch and sequence swapped": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "channels first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "expanded batch": lambda x: x[:1].expand(4, -1, -1),
    "no rows": lambda x: x[:, :0],
}


@every_norm
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("module", "width"), [(LocalNorm, 32), (LocalNorm, 8), (SpanningNorm, 32)])
def test_strided_input_gives_the_same(module, norm, layout, width):
    built = made(module, norm, width, torch.float32)
    base = torch.randn(4, 6, 32, generator=torch.Generator().manual_seed(5))
    strided = LAYOUTS[layout](base).detach().requires_grad_()
    plain = strided.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
    direction = torch.randn(strided.shape, generator=torch.Generator().manual_seed(6))
    for one, other in zip(*(
            [y, *torch.autograd.grad(y, [x, built.gain], direction)]
            for x in (strided, plain) for y in [built(x)]), strict=True):
        assert one.shape == other.shape
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_norm_of_heads_takes_each_head_by_itself():
    """On [1, 1, 3, 3] as two heads: [1, 1, 1, 1]; over all heads: [0.447, 0.447, 1.342, 1.342]."""
    x = torch.tensor([1.0, 1.0, 3.0, 3.0])
    own = heads_norm("q", HeadNorm(eps=0.0), 2, 2, Alone())
    together = heads_norm("q", HeadNorm(eps=0.0, scope="all_heads"), 2, 2, Alone())
    for module in (own, together):
        torch.nn.init.ones_(module.gain)
    assert torch.allclose(own(x), torch.ones(4))
    assert torch.allclose(together(x), torch.tensor([1.0, 1.0, 3.0, 3.0]) / 5 ** 0.5)


def test_gains_of_each_scope():
    """Shape, and whether a rank's gradient is a share: only a gain that several ranks' heads use."""
    tp = Alone()
    about = {
        "hidden": (hidden_norm("h", Norm(bias=True), 32, tp), (32,), False),
        "head": (heads_norm("q", HeadNorm(bias=True), 4, 8, tp), (8,), True),
        "all heads": (heads_norm("q", HeadNorm(bias=True, scope="all_heads"), 4, 8, tp), (32,), False),
        "inner": (inner_norm("m", Norm(bias=True), 48, tp), (48,), False),
    }
    for name, (module, shape, partial) in about.items():
        for parameter, role in ((module.gain, "norm"), (module.bias, "bias")):
            assert parameter.sharding.shape == shape, name
            assert parameter.sharding.partial is partial, name
            assert parameter.sharding.role == role, name
        assert (module.gain.sharding.dim is None) == (name in ("hidden", "head")), name


def test_a_gain_starts_where_the_slot_says():
    module = hidden_norm("h", Norm(gain_init=0.25), 8, Alone())
    assert module.gain.sharding.init.value == 0.25


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_eps_is_added_to_the_mean_square(kind):
    x = torch.tensor([2.0, -2.0])
    module = hidden_norm("h", Norm(kind=kind, eps=12.0), 2, Alone())
    torch.nn.init.ones_(module.gain)
    assert torch.allclose(module(x), torch.tensor([0.5, -0.5]))
