"""Padding is no token to a router: what it computes and records is that of the tokens alone."""

import pytest
import torch
from decoders import decoder, model_config, relative, tokens_of, weights

from megnorm.model.moe import MoE
from megnorm.model.router import Router

TRAINED = {
    "aux": {"balance": "aux", "aux_weight": 0.7},
    "sequence": {"balance": "sequence", "aux_weight": 0.7, "router": "sigmoid"},
    "bias": {"balance": "bias", "bias_rate": 0.25, "router": "sigmoid"},
    "capacity": {"balance": "aux", "aux_weight": 0.7, "capacity": 9.0},  # nothing is dropped
}


def padded(rows, length):
    """tokens, positions, documents [b, length], and which are real; padding has ids as any token."""
    tokens = torch.full((len(rows), length), 7)
    for row, own in enumerate(rows):
        tokens[row, :len(own)] = own
    real = torch.arange(length) < torch.tensor([len(own) for own in rows])[:, None]
    return (tokens, torch.arange(length).expand(len(rows), -1), real.int() - 1), real


def one_step(moe, inputs, real, recompute="none"):
    """Records by layer, biases, gradients by name, of a step of one micro batch."""
    model = model_config(moe={"experts": 6, "top_k": 2, "ffn_hidden": 20, "z_weight": 0.2, **moe})
    module = decoder(model, recompute=recompute)
    targets = tokens_of(model, len(real), 17, seed=1)[1][:, :real.shape[1]]  # the same ones of whatever length
    loss = module(inputs, targets, real / real.sum())
    loss.backward()
    routers = [part for part in module.modules() if isinstance(part, Router)]
    records = routers[0].routing.end_step(lambda sums: sums, micro_batches=1)
    return loss, records, [router.balance for router in routers], {name: p.grad for name, p in weights(module).items()}


def same(found, right, tolerance=1e-12):
    assert relative(found[0], right[0]) < tolerance
    for layer, its in right[1].items():
        for name, number in its._asdict().items():
            assert getattr(found[1][layer], name) == pytest.approx(number, rel=tolerance, abs=1e-15), name
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(found[2], right[2], strict=True))
    for name, its in right[3].items():
        assert relative(found[3][name], its) < tolerance, name


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("name", TRAINED)
def test_eight_tokens_and_the_same_eight_padded(name, recompute):
    """Loss, losses of the balance, z, loads, entropy, dropped, biases, gradients: fp64."""
    rows = tokens_of(model_config(), 2, 8)[0]
    inputs, real = padded(rows, 16)
    right = one_step(TRAINED[name], rows, torch.ones(2, 8, dtype=torch.bool))
    same(one_step(TRAINED[name], inputs, real, recompute), right)
    assert right[3]["layers.0.ffn.router.weight"].norm() > 1e-4


@pytest.mark.parametrize("name", TRAINED)
def test_rows_of_unequal_length(name):
    """However much is added to each."""
    rows = [row[:n] for row, n in zip(tokens_of(model_config(), 3, 8)[0], (8, 3, 5), strict=True)]
    found, right = (one_step(TRAINED[name], *padded(rows, length)) for length in (17, 8))
    same(found, right)
    if name == "sequence":  # each sequence over its own tokens
        alone = [one_step(TRAINED[name], row[None], torch.ones(1, len(row), dtype=torch.bool)) for row in rows]
        assert right[1][0].aux == pytest.approx(sum(one[1][0].aux for one in alone) / 3, rel=1e-12)


def test_padding_takes_no_place_of_a_token():
    """Where experts drop what is beyond their capacity: real tokens alike whatever stands behind them, and what is
    dropped of the padding is not counted."""
    moe = {"balance": "aux", "capacity": 0.4}
    rows = [row[:n] for row, n in zip(tokens_of(model_config(), 2, 9)[0], (9, 6), strict=True)]
    (tokens, *about), real = padded(rows, 12)
    other = torch.where(real, tokens, 3)
    same(one_step(moe, (other, *about), real), one_step(moe, (tokens, *about), real))
    model = model_config(moe={"experts": 6, "top_k": 2, "ffn_hidden": 20, **moe})
    module = decoder(model)
    layer = [part for part in module.modules() if isinstance(part, MoE)][0]
    seen = []
    layer.router.register_forward_hook(lambda _module, _args, output: seen.append(output[0]))
    module((tokens, *about), tokens, real / real.sum()).backward()
    record = layer.router.routing.end_step(lambda sums: sums, micro_batches=1)[0]
    over = (seen[0] == 6)
    assert record.dropped == pytest.approx(float(over[real].sum()) / (2 * 15), rel=1e-12)
    assert 0 < over[real].sum() < over.sum()
