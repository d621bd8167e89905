"""Rotary positions: fp32 angles whatever the model's dtype, and a product that depends on distances only."""

import pytest
import torch
from decoders import decoder, model_config, relative, tokens_of

from megnorm.config.placement import Norm
from megnorm.model.kernels import rms_norm
from megnorm.model.rotary import Rotary

LENGTH, SIZE, THETA = 4096, 64, 10000.0


def turned_pairs(dtype, length=LENGTH):
    """What position p makes of the vector (1, 0) of each pair: cos and sin [length, e/2]."""
    x = torch.zeros(1, 1, length, SIZE, dtype=dtype)
    x[..., : SIZE // 2] = 1
    return Rotary(SIZE, THETA)(x)[0, 0].double().chunk(2, -1)


def right_angles(length=LENGTH):
    return torch.arange(length).double()[:, None] * THETA ** (-torch.arange(0, SIZE, 2).double() / SIZE)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 4e-3), (torch.float32, 5e-4),
                                              (torch.float64, 1e-11)])
def test_table_of_4096_positions(dtype, limit):
    cos, sin = turned_pairs(dtype)
    assert (cos - right_angles().cos()).abs().max() < limit
    assert (sin - right_angles().sin()).abs().max() < limit


def test_bf16_positions_above_256_are_distinct():
    cos, sin = turned_pairs(torch.bfloat16, 260)
    turns = torch.cat((cos, sin), -1)[256:]
    for one in range(4):
        for other in range(one):
            assert (turns[one] - turns[other]).abs().max() > 0.05


@pytest.mark.parametrize("shift", [1, 7, 100])
def test_scores_depend_on_the_distance_only(shift):
    stream = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 1, SIZE, generator=stream, dtype=torch.float64).expand(1, 1, 256, SIZE)
            for _ in range(2))
    rotary = Rotary(SIZE, THETA)
    scores = (rotary(q) @ rotary(k).mT)[0, 0]
    assert torch.allclose(scores[shift:, shift:], scores[:-shift, :-shift], atol=1e-10)
    assert scores[:, 0].std() > 0.1


def test_turning_keeps_length_and_position_zero():
    x = torch.randn(2, 3, 50, SIZE, generator=torch.Generator().manual_seed(0))
    y = Rotary(SIZE, THETA)(x)
    assert torch.allclose(y.norm(dim=-1), x.norm(dim=-1), rtol=1e-5)
    assert torch.equal(y[:, :, 0], x[:, :, 0])


def test_gain_free_head_norm_and_rotation_commute():
    """I4; with a gain they don't."""
    x = torch.randn(2, 3, 50, SIZE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rotary, norm = Rotary(SIZE, THETA), Norm()
    one = torch.ones(SIZE, dtype=torch.float64)
    assert relative(rotary(rms_norm(x, one, None, norm)), rms_norm(rotary(x), one, None, norm)) < 1e-14
    gain = torch.linspace(0.5, 1.5, SIZE, dtype=torch.float64)
    assert relative(rotary(rms_norm(x, gain, None, norm)), rms_norm(rotary(x), gain, None, norm)) > 0.1


def test_the_model_cast_to_bf16_keeps_its_angles():
    """Casting the model leaves the angles alone: nothing but parameters is stored in it."""
    module = decoder(model_config(), dtype=torch.bfloat16)
    assert not list(module.buffers())


def test_training_after_a_look_in_inference_mode():
    """Tables made while sampling must serve a backward pass."""
    model = model_config()
    module, (tokens, targets) = decoder(model), tokens_of(model)
    with torch.inference_mode():
        before = module(tokens)
    module(tokens, targets, torch.ones(targets.shape, dtype=torch.float64)).backward()
    assert torch.allclose(module(tokens), before.clone())


def test_a_shorter_sequence_sees_the_same_angles():
    rotary, x = Rotary(SIZE, THETA), torch.randn(1, 1, 20, SIZE, generator=torch.Generator().manual_seed(0))
    short, long, again = rotary(x[:, :, :5]), rotary(x), rotary(x[:, :, :5])
    assert torch.equal(long[:, :, :5], short) and torch.equal(again, short)
