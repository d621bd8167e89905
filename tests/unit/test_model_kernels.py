"""The kernels with their own backward: against fp64 autograd of the plain equations, in every dtype, for views,
without gradients, recomputed."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from megnorm.model.block_causal import BLOCK, LONGEST, block_causal
from megnorm.model.core import make_core
from megnorm.model.kernels_rms import rms
from megnorm.parallel.cross_entropy import nats_and_log_z
from megnorm.parallel.tensor import Alone

# Relative error (Frobenius) of outputs and gradients: about a rounding of the dtype.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 8e-3}
DTYPES = list(TOLERANCE)


def noise(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def with_gradients(function, inputs, grad):
    """Output and gradients of inputs, in fp64 whatever the dtype."""
    inputs = [None if x is None else x.detach().requires_grad_() for x in inputs]
    y = function(*inputs)
    assert y.dtype == next(x.dtype for x in inputs if x is not None)
    y.backward(grad.to(y.dtype))
    return [y.detach().double(), *(x.grad.double() for x in inputs if x is not None)]


def assert_close(got, right, tolerance):
    for a, b in zip(got, right, strict=True):
        assert (a - b).norm() <= tolerance * b.norm(), f"{(a - b).norm() / b.norm():.1e}"


def plain_rms(x, gain, eps=1e-3):
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return y if gain is None else y * gain


def plain_attention(q, k, v, scale=0.3):
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    return (q @ k.transpose(-1, -2) * scale).masked_fill(later, -torch.inf).softmax(-1) @ v


def own_attention(q, k, v):
    return block_causal(q, k, v, 0.3)


def heads(dtype, s, h=4, k=2, b=3, e=8):
    """q, k, v as a projection leaves them, so no two of their dimensions are adjacent in memory; the output's grad."""
    tensors = [noise(b, s, n, e, dtype=dtype, seed=i).transpose(1, 2) for i, n in enumerate((h, k, k))]
    return tensors, noise(b, s, h, e, dtype=dtype, seed=9).transpose(1, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gain", [True, False])
@pytest.mark.parametrize("shape", [(2, 5, 16), (3, 7, 4, 8), (6,)])
def test_rms(dtype, gain, shape):
    x, g = noise(*shape, dtype=dtype), noise(shape[-1], dtype=dtype, seed=1) if gain else None
    grad = noise(*shape, dtype=dtype, seed=2)
    right = with_gradients(plain_rms, [x.double(), None if g is None else g.double()], grad.double())
    assert_close(with_gradients(lambda x, g: rms(x, g, 1e-3), [x, g], grad), right, TOLERANCE[dtype])


def test_rms_rounds_once():
    """The gain multiplies in fp32, and only the result is rounded to bf16, as by torch's own."""
    x, gain = noise(64, 32, dtype=torch.bfloat16), noise(32, dtype=torch.bfloat16, seed=1)
    own, exact = rms(x, gain, 1e-5), plain_rms(x.double(), gain.double(), 1e-5)
    half = torch.finfo(torch.bfloat16).eps / 2
    assert ((own.double() - exact).abs() <= 1.001 * half * exact.abs()).all()
    assert (own == F.rms_norm(x, (32,), gain, 1e-5)).double().mean() > 0.99


def test_rms_of_views():
    x, grad = noise(5, 12, 3).transpose(1, 2), noise(12, 3, 5).permute(2, 1, 0)
    gain = noise(24)[::2]
    right = with_gradients(plain_rms, [x, gain], grad)
    assert_close(with_gradients(lambda x, g: rms(x, g, 1e-3), [x, gain], grad), right, 1e-13)
    expanded = noise(1, 1).expand(5, 12)  # as the gradient of a sum comes
    right = with_gradients(plain_rms, [noise(5, 12), gain], expanded)
    assert_close(with_gradients(lambda x, g: rms(x, g, 1e-3), [noise(5, 12), gain], expanded), right, 1e-13)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("s", [1, 7, BLOCK, BLOCK + 1, 2 * BLOCK + 5])
def test_block_causal(dtype, s):
    inputs, grad = heads(dtype, s)
    right = with_gradients(plain_attention, [x.double() for x in inputs], grad.double())
    assert_close(with_gradients(own_attention, inputs, grad), right, TOLERANCE[dtype])


@pytest.mark.parametrize("h, k", [(1, 1), (4, 4), (6, 2), (4, 1)])
def test_block_causal_heads(h, k):
    inputs, grad = heads(torch.float64, BLOCK + 9, h=h, k=k)
    assert_close(with_gradients(own_attention, inputs, grad), with_gradients(plain_attention, inputs, grad), 1e-13)


def test_block_causal_large_scores():
    """Scores of some hundreds: the softmax is taken from their maximum, in fp32."""
    inputs, grad = heads(torch.bfloat16, BLOCK + 9)
    inputs = [inputs[0] * 64, *inputs[1:]]
    right = plain_attention(*(x.double() for x in inputs))
    assert (own_attention(*inputs).double() - right).norm() < 5e-3 * right.norm()


@pytest.mark.parametrize("function, inputs", [(lambda x, g: rms(x, g, 1e-3), [noise(4, 9), noise(9)]),
                                              (own_attention, heads(torch.float64, BLOCK + 3)[0])])
def test_without_gradients_and_recomputed(function, inputs):
    y = function(*inputs)
    with torch.no_grad():
        assert torch.equal(function(*(x.clone().requires_grad_() for x in inputs)), y)
    grad = noise(*y.shape, seed=5)
    again = with_gradients(lambda *x: checkpoint(function, *x, use_reentrant=False), inputs, grad)
    for a, b in zip(again, with_gradients(function, inputs, grad), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [13, 16])
def test_cross_entropy_in_chunks(monkeypatch, dtype, vocab):
    """Chunks of two rows, the last of them short; columns from ``vocab`` on are padding."""
    monkeypatch.setattr("megnorm.parallel.cross_entropy.CHUNK", 2 * vocab + 1)
    logits, grad = noise(3, 5, 16, dtype=dtype) * 4, noise(2, 3, 5, dtype=torch.float64, seed=1)
    targets = torch.arange(15).view(3, 5) % vocab

    def own(x):
        return torch.stack(nats_and_log_z(x, targets, vocab, Alone()))

    def plain(x):
        log_z = x[..., :vocab].logsumexp(-1)
        return torch.stack((log_z - x.gather(-1, targets.unsqueeze(-1)).squeeze(-1), log_z))

    x, y = logits.clone().requires_grad_(), logits.double().requires_grad_()
    assert_close([own(x).double()], [plain(y)], 1e-6)
    own(x).backward(grad.to(own(x).dtype))
    plain(y).backward(grad)
    assert_close([x.grad.double()], [y.grad], TOLERANCE[dtype])
    assert (x.grad[..., vocab:] == 0).all()


@pytest.mark.parametrize("s, own", [(BLOCK + 1, True), (LONGEST + 1, False)])
def test_core_takes_blocks_up_to_their_limit(monkeypatch, s, own):
    calls = []
    monkeypatch.setattr("megnorm.model.core.block_causal", lambda *a: calls.append(1) or block_causal(*a))
    inputs, _ = heads(torch.float32, s, h=2, k=1, b=1)
    y = make_core(0.3, None)(*inputs)
    assert bool(calls) == own
    assert torch.allclose(y, plain_attention(*inputs), atol=1e-5)
