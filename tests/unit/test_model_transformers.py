"""Logits and gradients in fp32 against transformers' own classes: weights copied, gains and biases random."""

import pytest
import torch
import torch.nn.functional as F
from decoders import decoder, model_config, relative, tokens_of, weights

transformers = pytest.importorskip("transformers")

def rope(theta=10000.0):
    return {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 1.0}


SIZES = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
         "hidden_act": "silu", "attn_implementation": "eager", "rms_norm_eps": 1e-5, "pad_token_id": None,
         "rope_parameters": rope()}
MATRICES = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
            "out": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
BOTH = {"attention.in_norm": "input_layernorm", "ffn.in_norm": "post_attention_layernorm"}
OUT = {"attention.out_norm": "post_attention_layernorm", "ffn.out_norm": "post_feedforward_layernorm"}
HEADS = {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}


def everywhere(attention, ffn):
    """A norm section whose overrides change every layer of ``pre``."""
    return {"scheme": "pre", "overrides": {":": {"attention": attention, "ffn": ffn}}}


OUTPUT_ONLY = {"in_norm": "none", "out_norm": "default"}
ALL_HEADS = {"scope": "all_heads"}
HEAD_NORMS = {"q_norm": "default", "k_norm": "default"}
FULL = {"layer_types": ["full_attention"] * 2}

# name: class, its options, our norm section, norm names (ours: theirs), other options of ours
CASES = {
    "llama": ("Llama", {}, "pre", BOTH, {}),
    "llama, all heads of their own": ("Llama", {"num_key_value_heads": 4}, "pre", BOTH, {"kv_heads": 4}),
    "llama, one kv head, untied": ("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": False}, "pre",
                                   BOTH, {"kv_heads": 1, "tie_embeddings": False}),
    "llama, wide heads, theta": ("Llama", {"head_dim": 12, "rope_parameters": rope(500.0)}, "pre",
                                  BOTH, {"head_size": 12, "rope_theta": 500.0}),
    "qwen3": ("Qwen3", {"head_dim": 8}, everywhere(HEAD_NORMS, {}), {**BOTH, **HEADS}, {}),
    "olmo2": ("Olmo2", {},
              everywhere({**OUTPUT_ONLY, "q_norm": ALL_HEADS, "k_norm": ALL_HEADS}, OUTPUT_ONLY),
              {**OUT, **HEADS}, {}),
    "exaone4": ("Exaone4", {"sliding_window": None, **FULL},
                everywhere({**OUTPUT_ONLY, **HEAD_NORMS}, OUTPUT_ONLY), {**OUT, **HEADS}, {}),
    "granite": ("Granite", {"residual_multiplier": 0.22, "attention_multiplier": 8 ** -0.5},
                everywhere({"branch_scale": 0.22}, {"branch_scale": 0.22}), BOTH, {}),
    "bitnet": ("BitNet", {}, everywhere({"ctx_norm": ALL_HEADS}, {"mid_norm": "default"}),
               {**BOTH, "attention.ctx_norm": "self_attn.attn_sub_norm",
                "ffn.mid_norm": "mlp.ffn_sub_norm"}, {}),
}


def theirs_of(name, options):
    torch.manual_seed(1)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, "tie_word_embeddings": True, **options})
    return getattr(transformers, f"{name}ForCausalLM")(config).float().eval()


def ours_of(norm, **options):
    model = model_config(vocab_size=32, norm=norm, **options)
    return model, decoder(model, dtype=torch.float32)


def names(norms, layers=2, tied=True):
    """Our global name: theirs."""
    found = {"embedding.weight": "model.embed_tokens.weight", "final_norm.gain": "model.norm.weight"}
    if not tied:
        found["output.weight"] = "lm_head.weight"
    for number in range(layers):
        for ours, theirs in MATRICES.items():
            part = "attention" if theirs.startswith("self_attn") else "ffn"
            found[f"layers.{number}.{part}.{ours}.weight"] = f"model.layers.{number}.{theirs}.weight"
        for ours, theirs in norms.items():
            found[f"layers.{number}.{ours}.gain"] = f"model.layers.{number}.{theirs}.weight"
    return found


def losses(module, theirs, model):
    """Both losses and logits over the same tokens, after backward."""
    tokens, targets = tokens_of(model)
    logits = module(tokens)
    loss = module(tokens, targets, torch.full(targets.shape, 1 / targets.numel()))
    loss.backward()
    others = theirs(input_ids=tokens, use_cache=False).logits
    F.cross_entropy(others.flatten(0, 1), targets.flatten()).backward()
    return logits, others


@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(case):
    name, theirs_options, norm, norms, options = CASES[case]
    model, module = ours_of(norm, **options)
    theirs = theirs_of(name, theirs_options)
    ours, others = weights(module), dict(theirs.named_parameters())
    mapping = names(norms, tied=model.tie_embeddings)
    assert sorted(mapping) == sorted(ours)
    assert sorted(set(mapping.values())) == sorted(others)
    with torch.no_grad():
        for mine, their in mapping.items():
            others[their].copy_(ours[mine])
    logits, right = losses(module, theirs, model)
    assert right.std() > 0.5
    assert relative(logits, right) < 1e-5
    for mine, their in mapping.items():
        assert others[their].grad.norm() > 1e-6, their
        assert relative(ours[mine].grad, others[their].grad) < 1e-5, mine


def test_one_slot_moved_is_not_olmo2():
    """A control: head norms per head, with OLMo 2's own gains of one head, are another function."""
    _, module = ours_of(CASES["olmo2"][2])
    _, moved = ours_of(everywhere({**OUTPUT_ONLY, **HEAD_NORMS}, OUTPUT_ONLY))
    model = model_config(vocab_size=32)
    with torch.no_grad():
        for name, value in weights(moved).items():
            value.copy_(weights(module)[name][: len(value)] if value.dim() == 1 else weights(module)[name])
        tokens, _ = tokens_of(model)
        assert relative(moved(tokens), module(tokens)) > 0.05


def test_gemma2_is_peri_with_gains_of_one_plus_weight():
    """Sandwich norm; embeddings times sqrt(d); soft-caps off, which this model does not have."""
    norms = {"attention.in_norm": "input_layernorm", "attention.out_norm": "post_attention_layernorm",
             "ffn.in_norm": "pre_feedforward_layernorm", "ffn.out_norm": "post_feedforward_layernorm"}
    model, module = ours_of("peri", tie_embeddings=False)
    theirs = theirs_of("Gemma2", {"tie_word_embeddings": False, "head_dim": 8, "query_pre_attn_scalar": 8,
                                  "attn_logit_softcapping": None, "final_logit_softcapping": None,
                                  "hidden_activation": "silu", "sliding_window": 64, **FULL})
    ours, others = weights(module), dict(theirs.named_parameters())
    mapping = names(norms, tied=False)
    assert sorted(mapping) == sorted(ours) and sorted(mapping.values()) == sorted(others)
    root = 32 ** 0.5
    with torch.no_grad():
        for mine, their in mapping.items():
            gain, embedding = mine.endswith("gain"), mine == "embedding.weight"
            others[their].copy_(ours[mine] - 1 if gain else ours[mine] / root if embedding else ours[mine])
    logits, right = losses(module, theirs, model)
    assert relative(logits, right) < 1e-5
    for mine, their in mapping.items():
        gradient = others[their].grad / root if mine == "embedding.weight" else others[their].grad
        assert relative(ours[mine].grad, gradient) < 1e-5, mine


def test_gpt_neox_is_pre_layer_norm_with_biases():
    """LayerNorm with bias, linears with biases, GELU (tanh form); q, k, v in one matrix, head by head."""
    model, module = ours_of({"scheme": "pre", "kind": "layer", "bias": True}, bias=True, activation="gelu",
                            tie_embeddings=False, kv_heads=4)
    theirs = theirs_of("GPTNeoX", {"tie_word_embeddings": False, "use_parallel_residual": False,
                                   "hidden_act": "gelu_new", "layer_norm_eps": 1e-5})
    ours, others = weights(module), dict(theirs.named_parameters())
    mapping = {"embedding.weight": "gpt_neox.embed_in.weight", "output.weight": "lm_head.weight"}
    linears = {"attention.out": "attention.dense", "ffn.up": "mlp.dense_h_to_4h",
               "ffn.down": "mlp.dense_4h_to_h"}
    norms = {"attention.in_norm": "input_layernorm", "ffn.in_norm": "post_attention_layernorm"}
    for end, norm_end in (("weight", "gain"), ("bias", "bias")):
        mapping[f"final_norm.{norm_end}"] = f"gpt_neox.final_layer_norm.{end}"
        for n in range(2):
            for table, our_end in ((linears, end), (norms, norm_end)):
                mapping |= {f"layers.{n}.{a}.{our_end}": f"gpt_neox.layers.{n}.{b}.{end}"
                            for a, b in table.items()}
    fused = {f"layers.{n}.attention.{{}}.{end}": f"gpt_neox.layers.{n}.attention.query_key_value.{end}"
             for n in range(2) for end in ("weight", "bias")}
    assert len(mapping) + 3 * len(fused) == len(ours) and len(mapping) + len(fused) == len(others)

    def split(whole):
        """[heads * 3 * e, ...] -> q, k, v of [heads * e, ...]."""
        return [part.flatten(0, 1) for part in whole.unflatten(0, (4, 3, 8)).unbind(1)]

    with torch.no_grad():
        for mine, their in mapping.items():
            others[their].copy_(ours[mine])
        for mine, their in fused.items():
            for part, letter in zip(split(others[their]), "qkv", strict=True):
                ours[mine.format(letter)].copy_(part)
    logits, right = losses(module, theirs, model)
    assert relative(logits, right) < 1e-5
    for mine, their in mapping.items():
        assert relative(ours[mine].grad, others[their].grad) < 1e-5, mine
    for mine, their in fused.items():
        for part, letter in zip(split(others[their].grad), "qkv", strict=True):
            gradient = ours[mine.format(letter)].grad
            assert (gradient - part).norm() < 1e-5 * max(part.norm(), 1e-2), mine.format(letter)


def test_minimax_is_post_norm_in_shifted_form_with_scales():
    """MiniMax-01: h = N(x), x = alpha h + beta F(h); full attention, one expert that takes every token."""
    norm = everywhere({"residual_from": "normed", "residual_scale": 1.7, "branch_scale": 0.8},
                      {"residual_from": "normed", "residual_scale": 1.3, "branch_scale": 0.9})
    model, module = ours_of(norm)
    factors = {f"full_attn_{end}": value for end, value in (("alpha_factor", 1.7), ("beta_factor", 0.8))}
    factors |= {"mlp_alpha_factor": 1.3, "mlp_beta_factor": 0.9}
    theirs = theirs_of("MiniMax", {"head_dim": 8, "num_local_experts": 1, "num_experts_per_tok": 1, **FULL,
                                   **factors})
    ours, others = weights(module), dict(theirs.named_parameters())
    mapping = {mine: their for mine, their in names(BOTH).items() if ".ffn." not in mine or "norm" in mine}
    with torch.no_grad():
        for mine, their in mapping.items():
            others[their].copy_(ours[mine])
        for n in range(2):
            gate_up, down = experts(others, n)
            gate_up.copy_(torch.cat((ours[f"layers.{n}.ffn.gate.weight"], ours[f"layers.{n}.ffn.up.weight"])))
            down.copy_(ours[f"layers.{n}.ffn.down.weight"])
    logits, right = losses(module, theirs, model)
    assert relative(logits, right) < 1e-5
    for mine, their in mapping.items():
        assert relative(ours[mine].grad, others[their].grad) < 1e-5, mine


def experts(parameters, layer):
    """The one expert's [gate; up] and down matrices."""
    mine = {name: p for name, p in parameters.items() if f"layers.{layer}." in name}
    (gate_up,) = [p for name, p in mine.items() if "gate_up_proj" in name]
    (down,) = [p for name, p in mine.items() if "down_proj" in name]
    return gate_up[0], down[0]
