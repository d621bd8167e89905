"""Every scheme against its paper's equation written out in scheme_equations.py: logits, and the gradient of every
parameter, in fp64; options of schemes; slots that no scheme uses; controls with another scheme's equation."""

import math
from functools import partial

import pytest
import scheme_equations as eq
import torch
from decoders import model_config, relative, tokens_of, weights

from megnorm.model.decoder import Decoder, TokenLoss, decoder_layers
from megnorm.model.init import initialise
from megnorm.model.scale import StepClock
from megnorm.norms import SCHEMES, placement_of
from megnorm.parallel.tensor import Alone

LAYERS, STEP = 4, 7
REFERENCES = eq.REFERENCES


def built(norm, **changes):
    """A model with random gains, biases and factors in training step 7, and its configuration."""
    options = {"options": {"steps": 5}, "scheme": "prores"} if norm == "prores" else norm
    init = {"std": 0.15, "embedding_std": 0.7, "policy": "normal"}
    model = model_config(layers=LAYERS, norm=options, init=init, **changes)
    layers = decoder_layers(model, placement_of(model), "none", Alone(), clock=StepClock(STEP))
    module = Decoder(layers, TokenLoss(model.vocab_size, Alone(), model.z_loss)).double()
    initialise(module.parameters(), seed=5)
    stream = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.sharding.role in ("norm", "bias"):
                parameter += 0.3 * torch.randn(parameter.shape, generator=stream, dtype=torch.float64)
    return model, module


def check(norm, reference, **changes):
    """Loss, logits and every gradient; each parameter must have a part in the reference."""
    model, module = built(norm, **changes)
    tokens, targets = tokens_of(model)
    ours = weights(module)
    theirs = {name: value.detach().clone().requires_grad_() for name, value in ours.items()}
    logits, right = module(tokens), reference(theirs, tokens)
    assert right.std() > 0.1
    assert relative(logits, right) < 1e-10
    weight = torch.full(targets.shape, 1 / targets.numel(), dtype=torch.float64)
    module(tokens, targets, weight).backward()
    loss = -torch.log_softmax(right[..., :model.vocab_size], -1).gather(-1, targets[..., None]).mean()
    if model.z_loss:
        loss = loss + model.z_loss * right[..., :model.vocab_size].exp().sum(-1).log().square().mean()
    loss.backward()
    for name, parameter in ours.items():
        assert theirs[name].grad is not None and theirs[name].grad.norm() > 1e-9, f"{name} has no part"
        assert relative(parameter.grad, theirs[name].grad) < 1e-10, name


def test_every_scheme_has_a_reference():
    assert set(REFERENCES) == set(SCHEMES)


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_scheme_computes_its_papers_equation(scheme):
    check(scheme, REFERENCES[scheme])


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_no_other_schemes_equation_passes(scheme):
    """Every other equation that finds its gains in this scheme's weights gives other logits."""
    same = [{"output", "olmo2"}, {"qk", "qwen3"}]  # differ by eps, by name only
    model, module = built(scheme)
    W, (tokens, _) = weights(module), tokens_of(model, batch=1, length=6)
    with torch.no_grad():
        logits = module(tokens)
        for other, reference in REFERENCES.items():
            if other == scheme or {scheme, other} in same:
                continue
            try:
                difference = relative(reference(W, tokens), logits)
            except (KeyError, TypeError, RuntimeError):
                continue
            assert difference > 1e-4, other


VARIANTS = {
    "normformer, ResScale": ({"scheme": "normformer", "options": {"resscale": True}},
                             eq.model(partial(eq.normformer, resscale=True), eq.ln)),
    "normformer as released": ({"scheme": "normformer", "options": {"head_scale": "after"}},
                               eq.model(partial(eq.normformer, where="after"), eq.ln)),
    "normformer with RMSNorm": ({"scheme": "normformer", "kind": "rms"}, eq.model(eq.normformer)),
    "EXAONE 4": ({"scheme": "output", "options": {"qk": "head"}}, eq.model(partial(eq.output, norms="qk"))),
    "output norm alone": ({"scheme": "output", "options": {"qk": "none"}}, eq.model(eq.output)),
    "mix_ln, half": ({"scheme": "mix_ln", "options": {"fraction": 0.5}}, eq.model(partial(eq.mix_ln, share=0.5))),
    "HybridNorm* 7B": ({"scheme": "hybrid_star", "options": {"attention_out_norm": True}},
                       eq.model(eq.hybrid_star_7b)),
    "keel with alpha": ({"scheme": "keel", "options": {"alpha": 1.5}},
                        eq.model(partial(eq.keel, alpha=1.5), final=False)),
    "prores over post": ({"scheme": "prores", "options": {"base": "post", "steps": 5}},
                         eq.model(partial(eq.prores, t=STEP, T=5, base="post"), final=False)),
    "post with LayerNorm": ({"scheme": "post", "kind": "layer", "bias": True}, eq.model(eq.post, eq.ln, final=False)),
    "close soft-caps": ({"scheme": "gemma2", "attention_softcap": 0.7, "final_softcap": 1.3},
                        eq.model(partial(eq.peri, cap=0.7), eq.rms_one_plus, embed=eq.times_root_d, cap=1.3)),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_options_of_schemes(variant):
    check(*VARIANTS[variant])


@pytest.mark.parametrize("scheme", ["hybrid_star", "gemma2"])
def test_z_loss_trains_and_is_recorded(scheme):
    check(scheme, REFERENCES[scheme], z_loss=0.3, tie_embeddings=False)
    model, module = built(scheme, z_loss=0.3)
    tokens, targets = tokens_of(model)
    weight = torch.full(targets.shape, 1 / targets.numel(), dtype=torch.float64)
    with_z = module(tokens, targets, weight)
    recorded = module.loss.meter.take()
    assert set(recorded) == {"z_loss"} == set(module.loss.parts)
    log_z = module(tokens)[..., :model.vocab_size].exp().sum(-1).log()
    assert recorded["z_loss"].item() == pytest.approx(0.3 * log_z.square().mean().item(), rel=1e-10)
    with torch.no_grad():
        assert module(tokens, targets, weight).item() == with_z.item()  # it has no part in the value
    assert module.loss.meter.take() == {}  # nor does an evaluation record it


def test_factors_that_grow_with_the_step_are_whole_in_a_finished_model():
    """Without a clock; at step 0 of a run no branch has begun."""
    model = model_config(layers=2, norm={"scheme": "prores", "options": {"steps": 5}})
    tokens, _ = tokens_of(model)
    logits = {}
    for clock in (None, StepClock(5 * 2), StepClock(0), StepClock(4)):
        layers = decoder_layers(model, placement_of(model), "none", Alone(), clock=clock)
        module = Decoder(layers, TokenLoss(model.vocab_size, Alone()))
        initialise(module.parameters(), seed=5)
        logits[clock and clock.step] = module(tokens)
    assert torch.equal(logits[None], logits[10])
    x = module.layers[0](tokens)
    assert torch.allclose(logits[0], module.layers[-1](module.layers[-2](x)))
    assert relative(logits[4], logits[10]) > 1e-3


# Slots that no scheme uses: x + F(N(x)) with one of them added, by its equation.

def everywhere(attention=None, ffn=None, **rest):
    return {"scheme": "pre", "overrides": {":": {"attention": attention or {}, "ffn": ffn or {}}}, **rest}


def l2(p, x):
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-5) * p["gain"]


def bare(norm):
    return lambda p, x: norm({"gain": 1.0}, x)


def one_kind(kind):
    return eq.model(partial(eq.pre, norms="qkvc"), kind)


def one_plus(p, x):
    return eq.rms_one_plus(p, x, eps=1e-5)


HEADS = dict.fromkeys(("q_norm", "k_norm", "v_norm", "ctx_norm"), "default")
WHOLE = dict.fromkeys(("q_norm", "k_norm", "ctx_norm"), {"scope": "all_heads"})
PER_HEAD = dict.fromkeys(HEADS, {"gain": "per_head"})


def after_rope(a, f, x, l, L):
    """q and k turned, then normed."""
    h = a.in_(x)
    q, k = ((h @ a[f"{n}.weight"].T).reshape(*h.shape[:2], heads, eq.E) for n, heads in (("q", eq.H), ("k", eq.KV)))
    q, k = a.q(eq.turn(q)), a.k(eq.turn(k)).repeat_interleave(2, 2)
    v = (h @ a["v.weight"].T).reshape(*h.shape[:2], eq.KV, eq.E).repeat_interleave(2, 2)
    scores = torch.einsum("bihe,bjhe->bhij", q, k) / math.sqrt(eq.E)
    scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
    y = x + torch.einsum("bhij,bjhe->bihe", scores.softmax(-1), v).flatten(2) @ a["out.weight"].T
    return y + eq.ffn(f, f.in_(y))


def scaled_scores(a, f, x, l, L):
    """Scores times 0.5 instead of 1 / sqrt(e): as if q were 0.5 sqrt(e) times as large."""
    wider = eq.Part({**a.W, f"{a.name}.q.weight": a["q.weight"] * (0.5 * math.sqrt(eq.E))}, a.name, a.norm)
    return eq.pre(wider, f, x, l, L)


def gated(a, f, x, l, L, size):
    h = a.in_(x)
    y = x + eq.attention(a, h, context=lambda c: c * eq.gate(a, h, size))
    return y + eq.ffn(f, f.in_(y))


def scales(a, f, x, l, L):
    """A learned vector on attention's residual, a learned scalar on its branch; constants in the FFN."""
    y = a["residual_scale.factor"] * x + a["branch_scale.factor"] * eq.attention(a, a.in_(x))
    return 1.3 * y + 0.7 * eq.ffn(f, f.in_(y))


SLOTS = {
    "l2 everywhere": ({**everywhere(HEADS), "kind": "l2"}, one_kind(l2)),
    "dyt everywhere": ({**everywhere(HEADS), "kind": "dyt", "alpha_init": 2.0}, one_kind(eq.dyt)),
    "dyt over all heads and inside": ({**everywhere(WHOLE, {"mid_norm": "default"}), "kind": "dyt"}, eq.model(
        lambda a, f, x, l, L: (y := x + eq.attention(a, a.in_(x), whole="qkc")) + eq.ffn(f, f.in_(y), f.mid), eq.dyt)),
    "l2 over all heads and inside": ({**everywhere(WHOLE, {"mid_norm": "default"}), "kind": "l2"}, eq.model(
        lambda a, f, x, l, L: (y := x + eq.attention(a, a.in_(x), whole="qkc")) + eq.ffn(f, f.in_(y), f.mid), l2)),
    "a gain per head": (everywhere(PER_HEAD), one_kind(eq.rms)),
    "a gain and bias per head, LayerNorm": ({**everywhere(PER_HEAD), "kind": "layer", "bias": True}, one_kind(eq.ln)),
    "no gains": ({**everywhere(HEADS), "gain": "none"}, one_kind(bare(eq.rms))),
    "no gains, l2": ({**everywhere(HEADS), "gain": "none", "kind": "l2"}, one_kind(bare(l2))),
    "gains of one plus weight": ({**everywhere(HEADS), "zero_centred": True}, one_kind(one_plus)),
    "norm after rotation": (everywhere({"q_norm": {"rope": "after"}, "k_norm": {"rope": "after"}}),
                            eq.model(after_rope)),
    "a gate per head": (everywhere({"gate": "head"}), eq.model(partial(gated, size=1))),
    "a gate per element": (everywhere({"gate": "element"}), eq.model(partial(gated, size=eq.E))),
    "factors": (everywhere({"residual_scale": {"learned": "vector"}, "branch_scale": {"learned": "scalar"}},
                           {"residual_scale": 1.3, "branch_scale": 0.7}), eq.model(scales)),
    "scale of the scores": (everywhere(attention_scale=0.5), eq.model(scaled_scores)),
    "soft-caps": (everywhere(attention_softcap=0.6, final_softcap=2.0),
                  eq.model(partial(eq.pre, cap=0.6), cap=2.0)),
    "embedding scaled, then normed": (everywhere(embed_scale={"value": 3.0, "learned": "vector"}, embed_norm="default"),
                                      eq.model(eq.pre, embed=lambda W, x: eq.rms(
                                          {"gain": W["embed_norm.gain"]}, W["embed_scale.factor"] * x))),
    "constant factor on a norm": (everywhere({"in_norm": {"scale": 0.5}, "q_norm": {"scale": 2.0, "gain": "none"}}),
                                  eq.model(lambda a, f, x, l, L: eq.pre(eq.Part(
                                      {**a.W, f"{a.name}.q_norm.gain": 2.0,
                                       f"{a.name}.in_norm.gain": 0.5 * a["in_norm.gain"]}, a.name, a.norm),
                                      f, x, l, L, norms="q"))),
}


@pytest.mark.parametrize("case", [*sorted(SCHEMES), *SLOTS])
def test_bf16_stays_near(case):
    """The same model in bf16: its dtype, and values within what its rounding allows."""
    model, module = built(SLOTS[case][0] if case in SLOTS else case)
    tokens, _ = tokens_of(model)
    with torch.no_grad():
        right = module(tokens)
        logits = module.bfloat16()(tokens)
    assert logits.dtype == torch.bfloat16
    assert relative(logits.double(), right) < 0.05


@pytest.mark.parametrize("slot", SLOTS)
def test_slots_of_no_scheme(slot):
    check(*SLOTS[slot])
