"""Decoders with experts in fp32 against transformers' classes, its balance loss and DeepSeek-V3's router, and a block
of HybridNorm with experts in closed form."""

import pytest
import torch
import torch.nn.functional as F
from decoders import decoder, model_config, relative, tokens_of, weights

from megnorm.config import Moe
from megnorm.model.router import Router

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 20, "moe_intermediate_size": 20,
         "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
         "rms_norm_eps": 1e-5, "pad_token_id": None, "head_dim": 8, "tie_word_embeddings": False,
         "attn_implementation": "eager",
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}}
HEADS = {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}
EVERYWHERE = {"scheme": "pre", "overrides": {":": {"attention": {"q_norm": "default", "k_norm": "default"}}}}
# name: preset, norm section, norms of the heads, options of theirs for as many experts as ours
CASES = {
    "Olmoe": ("olmoe", "qk_all_heads", HEADS, {"num_experts": 6, "num_experts_per_tok": 2}),
    "Mixtral": ("mixtral", "pre", {}, {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "Qwen3Moe": ("qwen3_moe", EVERYWHERE, HEADS,
                 {"num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True}),
}


def pair(name):
    """Our decoder, theirs, and (ours, theirs) by name of the parameters that are one to one; weights are equal."""
    preset, norm, heads, options = CASES[name]
    model = model_config(vocab_size=32, norm=norm, tie_embeddings=False,
                         moe={"preset": preset, "ffn_hidden": 20, "experts": 6, "top_k": 2})
    module = decoder(model, dtype=torch.float32)
    theirs = getattr(transformers, f"{name}ForCausalLM")(
        getattr(transformers, f"{name}Config")(**{**SIZES, **options})).float().eval()
    ours, others = weights(module), dict(theirs.named_parameters())
    mapping = {"embedding.weight": "model.embed_tokens.weight", "final_norm.gain": "model.norm.weight",
               "output.weight": "lm_head.weight"}
    for n in range(2):
        linears = {f"attention.{q}.weight": f"self_attn.{p}_proj.weight"
                   for q, p in (("q", "q"), ("k", "k"), ("v", "v"), ("out", "o"))}
        norms = {"attention.in_norm": "input_layernorm", "ffn.in_norm": "post_attention_layernorm", **heads}
        (router,) = [their for their in others if f"layers.{n}.mlp.gate" in their]
        its = {**linears, **{f"{a}.gain": f"{b}.weight" for a, b in norms.items()}}
        mapping |= {f"layers.{n}.{a}": f"model.layers.{n}.{b}" for a, b in its.items()}
        mapping[f"layers.{n}.ffn.router.weight"] = router
        for end in ("gate_up", "down"):
            (mapping[f"layers.{n}.ffn.experts.{end}"],) = [their for their in others
                                                          if f"layers.{n}." in their and f"experts.{end}" in their]
    assert sorted(mapping) == sorted(ours) and sorted(mapping.values()) == sorted(others)
    with torch.no_grad():
        for mine, their in mapping.items():
            others[their].copy_(ours[mine].view(others[their].shape))
    return module, theirs, {mine: (ours[mine], others[their]) for mine, their in mapping.items()}


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name):
    """Logits, and the gradients of the cross entropy."""
    module, theirs, parameters = pair(name)
    next(part for part in module.modules() if isinstance(part, Router)).routing.loss_scale = 0.0
    tokens, targets = tokens_of(model_config(vocab_size=32))
    logits = module(tokens)
    module(tokens, targets, torch.full(targets.shape, 1 / targets.numel())).backward()
    right = theirs(input_ids=tokens, use_cache=False).logits
    F.cross_entropy(right.flatten(0, 1), targets.flatten()).backward()
    assert right.std() > 0.5 and relative(logits, right) < 1e-5
    for mine, (own, its) in parameters.items():
        assert its.grad.norm() > 1e-6, mine
        assert relative(own.grad.view(its.shape), its.grad) < 1e-5, mine


@pytest.mark.parametrize("name", CASES)
def test_the_preset_weighs_the_balance_loss_as_transformers_does(name):
    """Its load_balancing_loss_func of one layer is top_k times ours, so that weight times loss is the same; the
    gradients of the router too. OLMoE's 0.01 is that of its own training code, whose loss is ours; Mixtral's weight is
    that of the 8x7B model, not of the class."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    preset, config = CASES[name][0], getattr(transformers, f"{name}Config")()
    model = model_config(moe={"preset": preset, "ffn_hidden": 20, "z_weight": 0.0})
    moe, published = model.moe, getattr(config, "num_local_experts", None) or config.num_experts
    assert (moe.experts, moe.top_k) == (published, config.num_experts_per_tok)
    assert moe.normalise_top_k == (name != "Olmoe")
    router = next(part for part in decoder(model).modules() if isinstance(part, Router))
    logits = torch.randn(2, 40, moe.experts, dtype=torch.float64, requires_grad=True,
                         generator=torch.Generator().manual_seed(0))
    chosen = logits.topk(moe.top_k).indices
    ours, seen = router.losses(logits, router.log_scores(logits), chosen, chosen)
    theirs = load_balancing_loss_func((logits.flatten(0, 1),), moe.experts, moe.top_k)
    assert seen.aux.item() * moe.top_k == pytest.approx(theirs.item(), rel=1e-6)
    weight = {"Olmoe": 0.01 / moe.top_k, "Mixtral": 0.02, "Qwen3Moe": config.router_aux_loss_coef}[name]
    weighed = weight * theirs
    assert ours.item() * 2 == pytest.approx(weighed.item(), rel=1e-6)  # a mean over two layers
    (found,), (right,) = torch.autograd.grad(2 * ours, logits), torch.autograd.grad(weighed, logits)
    assert relative(found, right) < 1e-6


def test_routes_as_deepseek_v3():
    """Its own module, with groups of experts: which experts, and their factors; and the preset's numbers."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    published = transformers.DeepseekV3Config()
    moe = Moe(preset="deepseek_v3", ffn_hidden=20)
    assert (moe.experts, moe.top_k, moe.shared_experts) == (published.n_routed_experts, published.num_experts_per_tok,
                                                            published.n_shared_experts)
    assert (moe.groups, moe.top_groups) == (published.n_group, published.topk_group)
    assert (moe.routed_scale, moe.normalise_top_k) == (published.routed_scaling_factor, published.norm_topk_prob)
    config = transformers.DeepseekV3Config(hidden_size=32, moe_intermediate_size=20, n_routed_experts=8, n_group=4,
                                           topk_group=2, num_experts_per_tok=3)
    torch.manual_seed(0)
    theirs = DeepseekV3MoE(config).float()
    model = model_config(moe={"preset": "deepseek_v3", "experts": 8, "top_k": 3, "groups": 4, "top_groups": 2,
                              "ffn_hidden": 20})
    layer = decoder(model, dtype=torch.float32).layers[1].ffn.body
    own = {p.sharding.name.removeprefix("layers.0.ffn."): p for p in layer.parameters()}
    with torch.no_grad():
        layer.router.balance.copy_(torch.linspace(-0.2, 0.2, 8))
        for their, mine in (("gate.weight", own["router.weight"]), ("gate.e_score_correction_bias", layer.router.balance),
                            ("experts.gate_up_proj", own["experts.gate_up"]), ("experts.down_proj", own["experts.down"]),
                            *((f"shared_experts.{end}_proj.weight", own[f"shared.{end}.weight"])
                              for end in ("gate", "up", "down"))):
            target = theirs.state_dict()[their]
            target.copy_(mine.view(target.shape))
    x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(1))
    unbiased = layer.router(x)[0]
    right = theirs(x)
    assert relative(layer(x), right) < 1e-5
    layer.router.moe = model.moe.model_copy(update={"top_groups": 4})
    assert not torch.equal(layer.router(x)[0], unbiased), "the groups decide here"
    layer.router.moe = model.moe
    layer.router.balance.zero_()
    assert not torch.equal(layer.router(x)[0], unbiased) and relative(layer(x), right) > 1e-2


def rms(x, gain):
    return gain * x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5)


def turned(x):
    """Rotary positions of x [b, h, s, e], pairs (i, i + e/2)."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * 10000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def hybrid_block(x, W):
    """y = x + A(x) with q, k, v normed per head, out = N(y) + MoE(N(y)): arXiv:2503.04598, eq. 6."""
    def heads(name, count):
        split = (x @ W[f"attention.{name}.weight"].T).unflatten(-1, (count, 8)).transpose(1, 2)
        split = rms(split, W[f"attention.{name}_norm.gain"])
        return (split if name == "v" else turned(split)).repeat_interleave(4 // count, 1)

    q, k, v = heads("q", 4), heads("k", 2), heads("v", 2)
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    p = (q @ k.transpose(-1, -2) / 8 ** 0.5).masked_fill(~mask, -torch.inf).softmax(-1)
    y = x + (p @ v).transpose(1, 2).flatten(2) @ W["attention.out.weight"].T
    n = rms(y, W["ffn.in_norm.gain"])
    scores = (n @ W["ffn.router.weight"].T).softmax(-1)
    kept = torch.zeros_like(scores).scatter(-1, scores.topk(2).indices, 1.0)
    out = n
    for e in range(6):
        gate, up = (n @ W["ffn.experts.gate_up"][e].transpose(-1, -2).unsqueeze(1)).unbind(0)
        out = out + (kept * scores)[..., e:e + 1] * ((F.silu(gate) * up) @ W["ffn.experts.down"][e].T)
    return out


def test_a_hybrid_norm_block_with_experts():
    """The second block of HybridNorm* in fp64, with the gradients of the input and of every parameter."""
    model = model_config(norm="hybrid_star", moe={"experts": 6, "top_k": 2, "ffn_hidden": 20, "balance": "none",
                                                  "z_weight": 0.0})
    block = decoder(model).layers[2]
    W = {p.sharding.name.removeprefix("layers.1."): p for p in block.parameters()}
    x = torch.randn(2, 7, 32, dtype=torch.float64, requires_grad=True, generator=torch.Generator().manual_seed(2))
    along = torch.randn(2, 7, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    found, right = block(x), hybrid_block(x, W)
    assert relative(found, right) < 1e-12
    for name, got, its in zip(("x", *W), torch.autograd.grad((found * along).sum(), [x, *W.values()]),
                              torch.autograd.grad((right * along).sum(), [x, *W.values()]), strict=True):
        assert its.norm() > 1e-3 and relative(got, its) < 1e-11, name
