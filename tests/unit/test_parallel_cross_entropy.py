"""Cross entropy on one rank: against torch's, with padded columns, in fp32 on bf16 scores, and as a mean
over the tokens of the global batch."""

import pytest
import torch
import torch.nn.functional as F
from decoders import decoder, model_config, relative, tokens_of, weights

from megnorm.model.decoder import TokenLoss
from megnorm.parallel.cross_entropy import cross_entropy
from megnorm.parallel.tensor import Alone


def scores(vocab, padded, dtype=torch.float64, size=3.0):
    stream = torch.Generator().manual_seed(1)
    logits = (size * torch.randn(3, 5, padded, generator=stream, dtype=torch.float64)).to(dtype)
    logits[..., vocab:] += 50  # padding that would win the softmax
    return logits.requires_grad_(), torch.randint(vocab, (3, 5), generator=stream)


@pytest.mark.parametrize(("vocab", "padded"), [(29, 32), (32, 32), (1, 8), (7, 8)])
def test_equals_torch_without_the_padding(vocab, padded):
    logits, targets = scores(vocab, padded)
    targets[0, :2] = torch.tensor([0, vocab - 1])
    weight = torch.randn(3, 5, dtype=torch.float64)
    loss = cross_entropy(logits, targets, vocab, Alone())
    right = F.cross_entropy(logits[..., :vocab].flatten(0, 1), targets.flatten(), reduction="none").view(3, 5)
    assert torch.allclose(loss, right, rtol=1e-12, atol=1e-14)
    (got,) = torch.autograd.grad((loss * weight).sum(), logits)
    (other,) = torch.autograd.grad((right * weight).sum(), logits)
    assert torch.allclose(got, other, rtol=1e-12, atol=1e-14)
    assert bool((got[..., vocab:] == 0).all())


def test_bf16_scores_are_summed_in_fp32():
    """50,000 equal scores: log of their number, which a sum in bf16 (it stops at 256) misses by far."""
    logits = torch.zeros(1, 50_000, dtype=torch.bfloat16, requires_grad=True)
    loss = cross_entropy(logits, torch.tensor([7]), 50_000, Alone())
    assert loss.dtype == torch.float32
    assert abs(loss.item() - torch.tensor(50_000.0).log().item()) < 1e-5
    loss.sum().backward()
    assert logits.grad.dtype == torch.bfloat16
    right = torch.full((50_000,), 1 / 50_000, dtype=torch.float64)
    right[7] -= 1
    assert torch.allclose(logits.grad[0].double(), right, rtol=2 ** -8, atol=0)


def test_bf16_against_the_same_scores_in_fp64():
    logits, targets = scores(29, 32, torch.bfloat16)
    loss = cross_entropy(logits, targets, 29, Alone())
    wide = logits.detach().double().requires_grad_()
    right = F.cross_entropy(wide[..., :29].flatten(0, 1), targets.flatten(), reduction="none").view(3, 5)
    assert relative(loss.double(), right) < 1e-6
    loss.sum().backward()
    right.sum().backward()
    assert relative(logits.grad.double(), wide.grad) < 4e-3


@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_large_scores_stay_finite(offset):
    logits, targets = scores(29, 32)
    right = cross_entropy(logits, targets, 29, Alone())
    assert torch.allclose(cross_entropy(logits + offset, targets, 29, Alone()), right, rtol=1e-9)


def test_scores_are_left_as_they_were():
    logits, targets = scores(29, 32)
    before = logits.detach().clone()
    cross_entropy(logits, targets, 29, Alone()).sum().backward()
    assert torch.equal(logits, before)


def test_without_gradients():
    logits, targets = scores(29, 32)
    right = cross_entropy(logits, targets, 29, Alone())
    with torch.no_grad():
        assert torch.equal(cross_entropy(logits, targets, 29, Alone()), right)
    assert torch.equal(cross_entropy(logits.detach(), targets, 29, Alone()), right)


def fixed_scores(losses):
    """Two columns of which target 0 costs exactly the given nats."""
    first = torch.zeros(len(losses), dtype=torch.float64)
    second = torch.log(torch.expm1(torch.tensor(losses, dtype=torch.float64)))
    return torch.stack((first, second), -1)


@pytest.mark.parametrize("split", ["one batch", "micro batches"])
def test_the_loss_is_a_mean_over_tokens_not_over_micro_batches(split):
    """9 tokens of 10 nats in one micro batch, 1 token of 2 nats in the other: 9.2, not 6."""
    logits = torch.stack((fixed_scores([10.0] * 9), fixed_scores([2.0] + [50.0] * 8))).requires_grad_()
    targets = torch.zeros(2, 9, dtype=torch.long)
    valid = torch.ones(2, 9, dtype=torch.float64)
    valid[1, 1:] = 0
    weight = valid / valid.sum()
    loss = TokenLoss(2, Alone())
    rows = [slice(0, 2)] if split == "one batch" else [slice(0, 1), slice(1, 2)]
    total = sum(loss(logits[r], (targets[r], weight[r])) for r in rows)
    assert total.item() == pytest.approx(9.2, rel=1e-12)
    total.backward()
    soft = torch.softmax(logits.detach(), -1) - torch.tensor([1.0, 0.0], dtype=torch.float64)
    assert torch.allclose(logits.grad, soft * weight[..., None], rtol=1e-9, atol=1e-15)


def test_padding_rows_of_the_embedding_get_no_gradient_from_the_output():
    model = model_config(tie_embeddings=True)
    module, (tokens, targets) = decoder(model), tokens_of(model)
    module(tokens, targets, torch.ones(targets.shape, dtype=torch.float64)).backward()
    gradient = weights(module)["embedding.weight"].grad
    assert gradient.shape == (32, 32)
    assert bool((gradient[29:] == 0).all()) and bool((gradient[:29].norm(dim=-1) > 0).all())
