"""Parameters counted by part: against a hand-built torch model and the arithmetic of each slot."""

import pytest
from torch import nn

from megnorm.config import Config, parse_config
from megnorm.model.decoder import Decoder, TokenLoss, decoder_layers
from megnorm.norms import SCHEMES, placement_of
from megnorm.parallel.sharding import sharding_of
from megnorm.parallel.tensor import Alone
from megnorm.plan.parameters import count_parameters, parameter_table


def make(sequence: int = 16, **model) -> Config:
    sizes = {"layers": 3, "hidden": 24, "heads": 4, "kv_heads": 2, "head_size": 8, "ffn_hidden": 40,
             "vocab_size": 29, "pad_vocab_to": 8, **model}
    return parse_config({"run_dir": "r", "model": sizes, "data": {"sequence_length": sequence, "train": "t"},
                         "train": {"steps": 10, "micro_batch": 1, "global_batch": 1},
                         "optimizer": {"lr": 1.0}})


@pytest.mark.parametrize("activation, matrices", [("swiglu", 3), ("gelu", 2), ("relu2", 2)])
@pytest.mark.parametrize("bias", [False, True])
def test_matrices_and_biases_equal_torch_linears(activation: str, matrices: int, bias: bool) -> None:
    def layer() -> nn.ModuleList:
        attention = [nn.Linear(24, 32, bias), nn.Linear(24, 16, bias), nn.Linear(24, 16, bias),
                     nn.Linear(32, 24, bias)]
        ffn = [nn.Linear(24, 40, bias) for _ in range(matrices - 1)] + [nn.Linear(40, 24, bias)]
        return nn.ModuleList(attention + ffn)

    built = list(nn.ModuleList(layer() for _ in range(3)).parameters())
    counts = count_parameters(make(activation=activation, bias=bias))
    assert counts["attention"] + counts["ffn"] == sum(p.numel() for p in built if p.dim() == 2)
    assert counts["biases"] == sum(p.numel() for p in built if p.dim() == 1)


@pytest.mark.parametrize("norm, expected", [
    ("pre", 3 * 2 * 24 + 24),
    ("post", 3 * 2 * 24),
    ("peri", 3 * 4 * 24 + 24),
    ("hybrid", 3 * (3 * 8 + 24) + 24),
    ("hybrid_star", 3 * (3 * 8 + 24) + 24 + 24),
    ({"scheme": "pre", "kind": "layer", "bias": True}, 2 * (3 * 2 * 24 + 24)),
    ({"scheme": "pre", "overrides": {"0": {"attention": {
        "q_norm": {"scope": "all_heads"}, "k_norm": {"scope": "all_heads"}, "ctx_norm": "default"}}}},
     3 * 2 * 24 + 24 + 32 + 16 + 8),
    ({"scheme": "pre", "overrides": {"1": {"ffn": {"mid_norm": "default", "post_norm": "default"}}}},
     3 * 2 * 24 + 24 + 40 + 24),
])
def test_norms_follow_the_placement(norm, expected: int) -> None:
    assert count_parameters(make(norm=norm))["norms"] == expected


def test_padded_vocabulary_and_totals() -> None:
    tied, untied = count_parameters(make()), count_parameters(make(tie_embeddings=False))
    assert tied["embedding"] == 32 * 24 and tied["output"] == 0
    assert untied["output"] == 32 * 24 and untied["total"] == tied["total"] + 32 * 24
    assert untied["non_embedding"] == tied["non_embedding"] == tied["total"] - 32 * 24
    assert list(tied) == ["embedding", "attention", "ffn", "router", "experts", "norms", "biases", "output", "total",
                          "non_embedding", "active"]
    assert tied["active"] == tied["total"]
    rows = {part: source for part, _, source in parameter_table(make())}
    assert "32 rows" in rows["embedding"] and "29 tokens" in rows["embedding"] and "tied" in rows["output"]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_counts_equal_the_built_model_of_every_scheme(scheme, bias) -> None:
    check_built({"norm": scheme, "bias": bias})


DYT = {"kind": "dyt", "bias": True}
EVERY_SLOT = {
    "attention": {"in_norm": DYT, "q_norm": {"gain": "per_head", "bias": True}, "k_norm": {"gain": "none"},
                  "v_norm": DYT, "ctx_norm": {"scope": "all_heads", "gain": "none", "bias": True},
                  "head_scale": "after", "gate": "head",
                  "residual_scale": {"learned": "vector"}, "branch_scale": {"learned": "scalar"}},
    "ffn": {"mid_norm": DYT, "post_norm": {"kind": "l2", "gain": "none"}, "residual_scale": {"learned": "scalar"}}}


@pytest.mark.parametrize("options", [
    {"bias": True, "norm": {"scheme": "pre", "embed_scale": {"learned": "vector"}, "embed_norm": "default",
                            "overrides": {"1": EVERY_SLOT, "2": {"attention": {"gate": "element"}}}}},
    {"norm": "pre"}, {"norm": "post", "tie_embeddings": False}, {"norm": "peri", "activation": "gelu"},
    {"norm": "hybrid", "bias": True}, {"norm": {"scheme": "hybrid_star", "kind": "layer", "bias": True}},
    {"norm": {"scheme": "pre", "overrides": {"1": {
        "attention": {"q_norm": {"scope": "all_heads"}, "k_norm": {"scope": "all_heads"},
                      "ctx_norm": "default"},
        "ffn": {"mid_norm": "default"}}}}},
    {"moe": {"experts": 4, "top_k": 2, "ffn_hidden": 10}},
    {"moe": {"experts": 4, "top_k": 2, "ffn_hidden": 10, "shared_experts": 2, "layers": "every 2"}, "bias": True,
     "activation": "gelu", "norm": {"scheme": "pre", "overrides": {":": {"ffn": {"mid_norm": DYT}}}}},
])
def test_counts_equal_the_built_model(options: dict) -> None:
    check_built(options)


def check_built(options: dict) -> None:
    model = make(**options).model
    built = Decoder(decoder_layers(model, placement_of(model), "none", Alone()),
                    TokenLoss(model.vocab_size, Alone()))
    counts, by_role, experts = count_parameters(make(**options)), {}, 0
    for parameter in built.parameters():
        role = sharding_of(parameter).role
        by_role[role] = by_role.get(role, 0) + parameter.numel()
        experts += parameter.numel() if sharding_of(parameter).experts else 0
    assert counts["total"] == sum(by_role.values())
    assert counts["norms"] + counts["biases"] == by_role.get("norm", 0) + by_role.get("bias", 0)
    matrices = sum(counts[part] for part in ("attention", "ffn", "router", "experts", "output"))
    assert matrices == by_role["matrix"]
    idle = 1 - model.moe.top_k / model.moe.experts if model.moe else 0
    assert counts["active"] == counts["total"] - idle * experts
    assert counts["embedding"] == by_role["embedding"]
