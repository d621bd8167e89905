"""How matrices start by the policy of each scheme, and Admin's factors, measured on a batch."""

import math

import pytest
import scheme_equations as eq
import torch
import torch.distributed as dist
from decoders import decoder, model_config, tokens_of, weights

from megnorm.config import ConfigError
from megnorm.model.decoder import decoder_layers
from megnorm.model.init import initialise
from megnorm.model.profile import has_profiled_scales, profile
from megnorm.norms import placement_of
from megnorm.parallel.groups import make_groups
from megnorm.parallel.tensor import Alone
from megnorm.plan.layout import Layout

D, FFN, HEADS, KV, LAYERS = 96, 200, 96, 48, 3


def deviations(**changes):
    """Standard deviation of each matrix by global name, of wide layers and without a cut."""
    init = {"cut": 1000.0, **changes.pop("init", {})}
    sizes = {"layers": LAYERS, "hidden": D, "heads": 8, "kv_heads": 4, "ffn_hidden": FFN, "vocab_size": 250}
    model = model_config(**{**sizes, "tie_embeddings": False, "init": init, **changes})
    built = [layer.build() for layer in decoder_layers(model, placement_of(model), "none", Alone())]
    parameters = {p.sharding.name: p for module in built for p in module.parameters()}
    initialise(parameters.values(), 3)
    return {name.removesuffix(".weight"): p.std().item() for name, p in parameters.items() if p.dim() == 2}


def xavier(outputs, inputs, gain=1.0):
    return gain * math.sqrt(2 / (outputs + inputs))


def expected(policy, layer, std):
    """By matrix, as section and paper of each policy say; l from 1."""
    l, L = layer + 1, LAYERS  # noqa: E741 -- the papers' letters
    names = ("attention.q", "attention.k", "attention.v", "attention.out", "ffn.gate", "ffn.up", "ffn.down")
    right = dict.fromkeys(names, std)
    if policy == "megatron":
        right |= dict.fromkeys(("attention.out", "ffn.down"), std / math.sqrt(2 * L))
    if policy == "depth_scaled":
        right |= {"attention.out": 1 / math.sqrt(2 * D * l), "ffn.down": 1 / math.sqrt(2 * FFN * l)}
    if policy == "deepnorm":
        beta = (8 * L) ** -0.25
        right = {"attention.q": xavier(HEADS, D), "attention.k": xavier(KV, D), "attention.v": xavier(KV, D, beta),
                 "attention.out": xavier(D, HEADS, beta), "ffn.gate": xavier(FFN, D, beta),
                 "ffn.up": xavier(FFN, D, beta), "ffn.down": xavier(D, FFN, beta)}
    if policy == "sub_ln":
        right |= dict.fromkeys(("attention.v", "attention.out", "ffn.gate", "ffn.up", "ffn.down"),
                               std * math.sqrt(math.log(2 * L)))
    return right


@pytest.mark.parametrize("policy", ["normal", "megatron", "depth_scaled", "deepnorm", "sub_ln"])
def test_policy(policy):
    std = 1 / math.sqrt(D) if policy == "depth_scaled" else 1 / math.sqrt(2.5 * D)
    found = deviations(init={"policy": policy})
    for layer in range(LAYERS):
        for name, right in expected(policy, layer, std).items():
            assert found[f"layers.{layer}.{name}"] == pytest.approx(right, rel=0.05), (layer, name)
    assert found["embedding"] == pytest.approx(std, rel=0.05)
    assert found["output"] == pytest.approx(1 / math.sqrt(D) if policy == "megatron" else std, rel=0.05)


@pytest.mark.parametrize(("scheme", "policy"), [
    ("pre", "megatron"), ("hybrid_star", "megatron"), ("peri", "normal"), ("lns", "normal"), ("deepnorm", "deepnorm"),
    ("sub_ln", "sub_ln"), ({"scheme": "prores", "options": {"base": "deepnorm"}}, "deepnorm")])
def test_a_scheme_brings_its_policy(scheme, policy):
    own, given = deviations(norm=scheme), deviations(norm=scheme, init={"policy": policy})
    assert own == given
    assert deviations(norm=scheme, init={"policy": "depth_scaled"}) != own


def test_given_deviations():
    found = deviations(norm="pre", init={"std": 0.02, "embedding_std": 1.0})
    assert found["embedding"] == pytest.approx(1.0, rel=0.05)
    assert found["output"] == pytest.approx(0.02, rel=0.05)
    assert found["layers.0.attention.q"] == pytest.approx(0.02, rel=0.05)
    assert found["layers.0.attention.out"] == pytest.approx(0.02 / math.sqrt(2 * LAYERS), rel=0.05)


def test_deepnorms_ratios():
    """Of v, out and the FFN to q: (8 L)^(-1/4), with the same fans (torchscale, arXiv:2203.00555)."""
    found = deviations(norm="deepnorm", kv_heads=8, ffn_hidden=D)
    for name in ("attention.v", "attention.out", "ffn.gate", "ffn.up", "ffn.down"):
        assert found[f"layers.1.{name}"] / found["layers.1.attention.q"] == pytest.approx(24 ** -0.25, rel=0.04), name
    assert found["layers.1.attention.k"] == pytest.approx(found["layers.1.attention.q"], rel=0.04)


@pytest.fixture
def groups():
    """Of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield make_groups(Layout(1, 1, 1), torch.device("cpu"))
    dist.destroy_process_group()


def test_admins_factors(groups):
    """w_1 = 1, w_{s+1}^2 = w_s^2 Var(x_s) + Var(f_s), with every w = 1 while x_s and f_s are measured."""
    model = model_config(layers=3, norm="admin")
    assert has_profiled_scales(model) and not has_profiled_scales(model_config(norm="post"))
    module = decoder(model)
    tokens, _ = tokens_of(model, batch=4)
    profile(module, 3, tokens.split(1), groups)

    W = weights(module)
    x, w = W["embedding.weight"][tokens], 1.0
    for layer in range(3):
        for part, body in (("attention", eq.attention), ("ffn", eq.ffn)):
            p = eq.Part(W, f"layers.{layer}.{part}", eq.ln)
            assert torch.allclose(p["residual_scale.factor"], torch.full((32,), w, dtype=torch.float64), rtol=1e-10)
            f = body(p, x)
            w = math.sqrt(w * w * x.var(unbiased=False).item() + f.var(unbiased=False).item())
            x = p.post(x + f)
    assert w > 1.2


def everywhere(**attention):
    return model_config(norm={"scheme": "pre", "overrides": {":": {"attention": attention}}})


@pytest.mark.parametrize(("slots", "message"), [
    ({"q_norm": {"gain": "per_head", "scope": "all_heads"}}, "gain=per_head needs scope=head"),
    ({"v_norm": {"rope": "after"}}, "rope=after is for q and k"),
    ({"branch_scale": {"learned": "vector", "profiled": True}}, "profiled=true is for residual_scale"),
])
def test_slots_without_an_effect_are_refused(slots, message):
    with pytest.raises(ConfigError, match=message):
        placement_of(everywhere(**slots))


def test_head_scale_after_the_projection_needs_even_chunks():
    with pytest.raises(ConfigError, match="head_scale=after in layer 0 cuts the 30 channels"):
        placement_of(model_config(hidden=30, head_size=8, norm={
            "scheme": "normformer", "options": {"head_scale": "after"}}))
