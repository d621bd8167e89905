"""Named schemes and rarer slots against transformers' own classes in fp32: random weights and gains, logits and
gradients. The plainer classes are in test_model_transformers."""

import pytest
import torch
from decoders import relative, weights
from test_model_transformers import BOTH, HEADS, OUT, SIZES, everywhere, losses, names, ours_of, rope, theirs_of

FULL = {"layer_types": ["full_attention"] * 2}
SANDWICH = {"attention.in_norm": "input_layernorm", "attention.out_norm": "post_attention_layernorm",
            "ffn.in_norm": "pre_feedforward_layernorm", "ffn.out_norm": "post_feedforward_layernorm"}
GEMMA = {"rms_norm_eps": 1e-6, "head_dim": 8, "query_pre_attn_scalar": 12, "hidden_activation": "silu",
         "sliding_window": 64, **FULL}
SWAPPED = [4, 5, 6, 7, 0, 1, 2, 3]


def swap(weight):
    """The two halves of each head's rows exchanged: its rotation goes the other way round."""
    return weight.unflatten(0, (-1, 8))[:, SWAPPED].flatten(0, 1)


# name: class, its options, our norm section, norm names (ours: theirs), our other options
CASES = {
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
               {"scheme": "gemma2", "attention_softcap": 2.0, "final_softcap": 3.0, "attention_scale": 12 ** -0.5},
               SANDWICH, {}),
    "gemma2, its own caps": ("Gemma2", {**GEMMA, "query_pre_attn_scalar": 8}, "gemma2", SANDWICH, {}),
    "qwen3": ("Qwen3", {"head_dim": 8, "rms_norm_eps": 1e-6}, "qwen3", {**BOTH, **HEADS}, {}),
    "olmo2": ("Olmo2", {"rms_norm_eps": 1e-6}, "olmo2", {**OUT, **HEADS}, {}),
    "exaone4": ("Exaone4", {"sliding_window": None, **FULL}, {"scheme": "output", "options": {"qk": "head"}},
                {**OUT, **HEADS}, {}),
    "bitnet": ("BitNet", {}, {"scheme": "sub_ln", "kind": "rms"},
               {**BOTH, "attention.ctx_norm": "self_attn.attn_sub_norm", "ffn.mid_norm": "mlp.ffn_sub_norm"}, {}),
    "granite": ("Granite", {"residual_multiplier": 0.22, "attention_multiplier": 0.3, "embedding_multiplier": 5.0},
                {**everywhere({"branch_scale": 0.22}, {"branch_scale": 0.22}), "embed_scale": 5.0,
                 "attention_scale": 0.3}, BOTH, {}),
}


def compare(model, module, theirs, mapping, changed=None):
    """mapping: our name to theirs; changed: our name to a function of our tensor that gives theirs."""
    ours, others, changed = weights(module), dict(theirs.named_parameters()), changed or {}
    assert sorted(mapping) == sorted(ours)
    with torch.no_grad():
        for mine, their in mapping.items():
            others[their].copy_(changed.get(mine, lambda x: x)(ours[mine]))
    logits, right = losses(module, theirs, model)
    assert right.std() > 0.3
    assert relative(logits, right) < 1e-5
    for mine, their in mapping.items():
        assert others[their].grad.norm() > 1e-6, their
        assert relative(changed.get(mine, lambda x: x)(ours[mine].grad), others[their].grad) < 1e-5, mine


@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(case):
    name, options, norm, norms, own = CASES[case]
    model, module = ours_of(norm, **own)
    theirs = theirs_of(name, options)
    mapping = names(norms)
    assert sorted(set(mapping.values())) == sorted(dict(theirs.named_parameters()))
    compare(model, module, theirs, mapping)


def test_gemma3():
    """The text model, which has a configuration of its own."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    options = {**SIZES, **GEMMA, "query_pre_attn_scalar": 8, "rope_parameters": {"full_attention": rope()}}
    theirs = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**options)).float().eval()
    compare(*ours_of("gemma3"), theirs, names({**SANDWICH, **HEADS}))


def test_a_moved_soft_cap_is_not_gemma2():
    """A control: another cap on the scores alone."""
    name, options, norm, norms, _ = CASES["gemma2"]
    model, module = ours_of({**norm, "attention_softcap": 2.1})
    with pytest.raises(AssertionError):
        compare(model, module, theirs_of(name, options), names(norms))


def test_nanochat():
    """No gains at all, q and k normed after the rotation, embedding normed, squared ReLU, soft-cap."""
    norm = {**everywhere(dict.fromkeys(("q_norm", "k_norm"), {"rope": "after"}), {}), "gain": "none",
            "embed_norm": "default", "final_softcap": 15.0}
    model, module = ours_of(norm, activation="relu2", tie_embeddings=False)
    theirs = theirs_of("NanoChat", {"hidden_act": "relu2", "tie_word_embeddings": False})
    mapping = {mine: their for mine, their in names({}, tied=False).items()
               if "gate" not in mine and "norm" not in mine}
    mapping = {mine: their.replace("up_proj", "fc1").replace("down_proj", "fc2") for mine, their in mapping.items()}
    turned = {mine: swap for mine in mapping if mine.endswith((".q.weight", ".k.weight"))}
    compare(model, module, theirs, mapping, turned)


def test_stablelm_has_a_layer_norm_per_head():
    """LayerNorm with bias on the stream; of q and k one per head, without bias."""
    heads = dict.fromkeys(("q_norm", "k_norm"), {"gain": "per_head", "bias": False})
    model, module = ours_of({**everywhere(heads, {}), "kind": "layer", "bias": True})
    theirs = theirs_of("StableLm", {"qk_layernorm": True, "use_parallel_residual": False, "layer_norm_eps": 1e-5})
    ours, others = weights(module), dict(theirs.named_parameters())
    per_head = {f"layers.{n}.attention.{q}_norm.gain": [
        others[f"model.layers.{n}.self_attn.{q}_layernorm.norms.{h}.weight"] for h in range(count)]
        for n in (0, 1) for q, count in (("q", 4), ("k", 2))}
    mapping = names(BOTH)
    mapping |= {mine.replace("gain", "bias"): their.replace("weight", "bias") for mine, their in mapping.items()
                if mine.endswith("norm.gain")}
    assert sorted([*mapping, *per_head]) == sorted(ours)
    with torch.no_grad():
        for mine, their in mapping.items():
            others[their].copy_(ours[mine])
        for mine, rows in per_head.items():
            for row, gain in zip(rows, ours[mine], strict=True):
                row.copy_(gain)
    logits, right = losses(module, theirs, model)
    assert relative(logits, right) < 1e-5
    for mine, their in mapping.items():
        assert relative(ours[mine].grad, others[their].grad) < 1e-5, mine
    for mine, rows in per_head.items():
        assert relative(ours[mine].grad, torch.stack([row.grad for row in rows])) < 1e-5, mine


def test_beam():
    """Shares of residual and branch by the number of the sublayer, q and k normed, gate per element."""
    options = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 64, "head_dim": 8,
               "rms_norm_eps": 1e-6, "final_logit_softcapping": None, "mlp_layer_types": ["dense"] * 2,
               "rope_parameters": {"sliding_attention": rope()}}
    model, module = ours_of("beam")
    theirs = theirs_of("Beam", options)
    mapping = names({**SANDWICH, **HEADS})
    mapping |= {f"layers.{n}.attention.gate.weight": f"model.layers.{n}.self_attn.gate_proj.weight" for n in (0, 1)}
    rest = set(dict(theirs.named_parameters())) - set(mapping.values())
    assert rest == {f"model.layers.{n}.self_attn.gate_bias" for n in (0, 1)}  # zero
    compare(model, module, theirs, mapping)


LAYER_NORM = {"kind": "layer", "bias": True, "eps": 1e-5}
# name: our norm section, their embeddings of tokens and positions, norm names (ours: theirs)
GPTS = {
    "OpenAIGPT": ({"scheme": "post", **LAYER_NORM}, "tokens_embed", "positions_embed",
                  {"layers.{}.attention.post_norm": "h.{}.ln_1", "layers.{}.ffn.post_norm": "h.{}.ln_2"}),
    "GPT2": ({"scheme": "pre", **LAYER_NORM}, "wte", "wpe",
             {"layers.{}.attention.in_norm": "h.{}.ln_1", "layers.{}.ffn.in_norm": "h.{}.ln_2", "final_norm": "ln_f"}),
}


@pytest.mark.parametrize("name", GPTS)
def test_the_first_two_gpts(name):
    """Post-norm and pre-norm with LayerNorm; matrices [in, out], q, k, v in one. Their learned positions are set to 0,
    ours are off."""
    transformers = pytest.importorskip("transformers")
    norm, embedding, positions, norms = GPTS[name]
    torch.manual_seed(1)
    sizes = {"vocab_size": 32, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "pad_token_id": None,
             "attn_implementation": "eager"} | dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.0)
    theirs = getattr(transformers, f"{name}LMHeadModel")(getattr(transformers, f"{name}Config")(**sizes)).float().train()
    model, module = ours_of(norm, positions="none", bias=True, activation="gelu", kv_heads=4, ffn_hidden=128)
    ours, others = weights(module), dict(theirs.transformer.named_parameters())
    linears = {"attention.out": "attn.c_proj", "ffn.up": "mlp.c_fc", "ffn.down": "mlp.c_proj"}
    pairs = {"embedding.weight": (f"{embedding}.weight", lambda w: w)}
    for n in range(2):
        for mine, their in linears.items():
            pairs[f"layers.{n}.{mine}.weight"] = f"h.{n}.{their}.weight", lambda w: w.T
            pairs[f"layers.{n}.{mine}.bias"] = f"h.{n}.{their}.bias", lambda b: b
        for i, letter in enumerate("qkv"):
            part = slice(32 * i, 32 * (i + 1))
            pairs[f"layers.{n}.attention.{letter}.weight"] = f"h.{n}.attn.c_attn.weight", lambda w, p=part: w[:, p].T
            pairs[f"layers.{n}.attention.{letter}.bias"] = f"h.{n}.attn.c_attn.bias", lambda b, p=part: b[p]
        for mine, their in norms.items():
            for end, theirs_end in (("gain", "weight"), ("bias", "bias")):
                pairs[f"{mine.format(n)}.{end}"] = f"{their.format(n)}.{theirs_end}", lambda g: g
    assert sorted(pairs) == sorted(ours) and {their for their, _ in pairs.values()} == set(others) - {f"{positions}.weight"}
    with torch.no_grad():
        others[f"{positions}.weight"].zero_()
        for mine, (their, view) in pairs.items():
            view(others[their]).copy_(ours[mine])
    logits, right = losses(module, theirs, model)
    assert right.std() > 0.3 and relative(logits, right) < 1e-5
    for mine, (their, view) in pairs.items():
        expected = view(others[their].grad)
        assert (ours[mine].grad - expected).norm() < 1e-5 * max(expected.norm(), 1e-2), mine  # k's bias: 0 in theory
