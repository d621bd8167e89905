"""``model.moe``: what it fills in, what it refuses, which blocks it names, how experts start."""

import math

import numpy as np
import pytest
import torch
from decoders import model_config
from test_config import TEXT, refusal

from megnorm.config import Moe, dump_config, parse_config
from megnorm.config.config import apply_override, read_yaml
from megnorm.model.decoder import decoder_layers
from megnorm.model.init import initialise
from megnorm.norms import equations, placement_of
from megnorm.parallel.expert import AllExperts
from megnorm.parallel.tensor import Alone
from megnorm.plan.layout import check_layout, make_layout

EXPERTS = {"experts": 8, "top_k": 2, "ffn_hidden": 16}


def config(*overrides, **moe):
    raw = read_yaml(TEXT, "text")
    raw["model"] |= {"vocab_size": 64, "moe": {**EXPERTS, **moe}}
    for override in overrides:
        apply_override(raw, override)
    return parse_config(raw)


@pytest.mark.parametrize(("changes", "words"), [
    ({"top_k": 9}, ("top_k=9", "experts=8", "1 to 8")),
    ({"capacity": 0}, ("model.moe.capacity=0", "greater than 0")),
    ({"layers": "first dense 4"}, ("moe.layers='first dense 4'", "layers=4")),
    ({"layers": "every 5"}, ("moe.layers='every 5'", "layers=4")),
    ({"layers": "every 0"}, ("layers='every 0'", "first dense K")),
    ({"layers": "odd"}, ("layers='odd'", "every N")),
    ({"balance": "none", "aux_weight": 0.1}, ("aux_weight=0.1", "balance=none", "aux or sequence or bias")),
    ({"groups": 3}, ("groups=3", "experts=8", "1, 2, 4")),
    ({"groups": 8}, ("groups=8", "1, 2, 4")),
    ({"groups": 4, "top_k": 5, "top_groups": 2}, ("top_groups=2", "top_k=5", "3 to 4")),
    ({"groups": 2, "top_groups": 3}, ("top_groups=3", "1 to 2")),
    ({"bias_rate": 0.1}, ("bias_rate=0.1", "balance=aux")),
    ({"preset": "gpt"}, ("model.moe.preset", "deepseek_v3")),
    ({"topk": 2}, ("model.moe.topk", "did you mean 'top_k'")),
    ({"experts": 0}, ("model.moe.experts=0",)),
])
def test_a_mistake_is_one_message(changes, words):
    message = refusal(config, **changes)
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_experts_must_fit_the_expert_parallel_ranks():
    for ep, world, words in ((3, 3, ("ep=3", "experts=8")), (4, 6, ("ep=4", "dp=6"))):
        given = config(f"parallel.ep={ep}", "train.global_batch=12")
        message = refusal(lambda given=given, world=world: check_layout(given, make_layout(given, world)))
        assert all(word in message for word in words), message


@pytest.mark.parametrize("changes", [{}, {"balance": "bias"}, {"balance": "none", "capacity": 1.25}, {"capacity": "none"},
                                     *({"preset": name, "experts": 16, "top_k": 2} for name in
                                       ("olmoe", "mixtral", "qwen3_moe", "deepseek_v3"))])
def test_a_dump_reads_back_equal(changes):
    given = config(**changes)
    assert parse_config(read_yaml(dump_config(given), "dump")) == given


def test_presets_fill_what_is_left_out():
    olmoe = Moe(preset="olmoe", ffn_hidden=8)
    assert (olmoe.experts, olmoe.top_k, olmoe.normalise_top_k) == (64, 8, False)
    assert (olmoe.aux_weight, olmoe.z_weight, olmoe.router) == (0.01, 0.001, "softmax")
    changed = Moe(preset="deepseek_v3", ffn_hidden=8, balance="aux", shared_experts=0)
    assert (changed.aux_weight, changed.bias_rate, changed.shared_experts, changed.router) == (0.01, 0.0, 0, "sigmoid")
    published = Moe(preset="deepseek_v3", ffn_hidden=8)
    assert (published.bias_rate, published.aux_weight, published.by_sequence) == (0.001, 0.0001, True)
    assert Moe(preset="mixtral", ffn_hidden=8, balance="none").aux_weight == 0.0


@pytest.mark.parametrize(("layers", "right"), [("all", (0, 1, 2, 3, 4, 5)), ("first dense 2", (2, 3, 4, 5)),
                                               ("every 2", (1, 3, 5)), ("every 6", (5,)), ("every 1", (0, 1, 2, 3, 4, 5))])
def test_blocks_with_experts(layers, right):
    model = model_config(layers=6, moe={**EXPERTS, "layers": layers})
    assert model.moe_layers == right
    for layer, built in enumerate(decoder_layers(model, placement_of(model), "none", Alone())[1:7]):
        names = {p.sharding.name for p in built.build().parameters()}
        assert (f"layers.{layer}.ffn.router.weight" in names) == (layer in right)
        assert (f"layers.{layer}.ffn.up.weight" in names) == (layer not in right)


class Part(AllExperts):
    """One of several expert-parallel ranks, which exchanges nothing."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size


class Shard(Alone):
    """One of several tensor-parallel ranks, which exchanges nothing."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size


def block_weights(tp, ep, **changes):
    """The second block's parameters by name, as built for these ranks."""
    model = model_config(moe=EXPERTS, **changes)
    built = decoder_layers(model, placement_of(model), "none", tp, ep=ep)[2].build()
    initialise(built.parameters(), seed=11)
    return {p.sharding.name.removeprefix("layers.1.ffn."): p for p in built.parameters()}


def test_experts_start_with_the_same_bits_on_every_layout():
    """Each expert, gate and up have streams of their own; a rank draws what it holds."""
    whole = block_weights(Alone(), AllExperts())
    for tp, ep in ((1, 4), (2, 2), (4, 1)):
        for shard in range(tp):
            for part in range(ep):
                mine = block_weights(Shard(shard, tp) if tp > 1 else Alone(), Part(part, ep), kv_heads=4)
                own = {name: p for name, p in mine.items() if name.startswith("experts")}
                assert sorted(own) == ["experts.down", "experts.gate_up"]
                n, f = slice(part * 8 // ep, (part + 1) * 8 // ep), slice(shard * 16 // tp, (shard + 1) * 16 // tp)
                assert torch.equal(own["experts.gate_up"], whole["experts.gate_up"][n, :, f])
                assert torch.equal(own["experts.down"], whole["experts.down"][n][:, :, f])
                assert torch.equal(mine["router.weight"], whole["router.weight"])
    matrices = [*whole["experts.gate_up"].flatten(0, 1), *whole["experts.down"].transpose(1, 2)]
    assert abs(np.corrcoef([m.detach().flatten() for m in matrices]) - np.eye(24)).max() < 0.3


@pytest.mark.parametrize("policy", ["normal", "megatron", "depth_scaled", "deepnorm", "sub_ln"])
def test_experts_start_by_the_policy_with_their_own_width(policy):
    """An expert as an FFN of its width, the router as q: without the factors of deepnorm and sub_ln."""
    d, f, n = 96, 200, 16
    model = model_config(layers=3, hidden=d, heads=8, kv_heads=4, ffn_hidden=640, init={"policy": policy, "cut": 1000.0},
                         moe={"experts": n, "top_k": 2, "ffn_hidden": f, "shared_experts": 2})
    built = decoder_layers(model, placement_of(model), "none", Alone())[2].build()
    initialise(built.parameters(), seed=3)
    std = {p.sharding.name.removeprefix("layers.1.ffn."): float(p.detach().std()) for p in built.parameters()}
    base = 1 / math.sqrt(d if policy == "depth_scaled" else 2.5 * d)
    inner = {"deepnorm": math.sqrt(2 / (d + f)) * 24 ** -0.25, "sub_ln": base * math.sqrt(math.log(6))}.get(policy, base)
    out = {"megatron": base / math.sqrt(6), "depth_scaled": 1 / math.sqrt(2 * f * 2)}.get(policy, inner)
    router = math.sqrt(2 / (d + n)) if policy == "deepnorm" else base
    for name, right in {"experts.gate_up": inner, "experts.down": out, "router.weight": router,
                        "shared.gate.weight": inner, "shared.up.weight": inner, "shared.down.weight": out}.items():
        assert std[name] == pytest.approx(right, rel=0.1 if name == "router.weight" else 0.02), name


def test_the_equations_name_blocks_with_experts():
    """Runs of equal layers end where experts begin; what MoE means stands in the legend."""
    model = model_config(layers=4, norm="normformer", moe={"preset": "deepseek_v3", "ffn_hidden": 8, "layers": "every 2"})
    lines = equations(placement_of(model), model.moe)
    heads = [line for line in lines if line.startswith("layer")]
    assert heads == ["layer 0:", "layer 1:", "layer 2:", "layer 3:"]
    bodies = [line.split("x + ")[1] for line in lines if "FFN(LayerNorm" in line or "MoE(LayerNorm" in line]
    assert bodies == ["FFN(LayerNorm(x), mid=LayerNorm)", "MoE(LayerNorm(x), mid=LayerNorm)"] * 2
    (legend,) = [line for line in lines if line.startswith("  MoE(x) is")]
    assert "sum of 2.5 * s_e * FFN_e(x) over the 8 of 256 experts" in legend and "sigmoid(W x)" in legend
    assert "s_e + b_e" in legend and "1 shared expert +" in legend
    assert not any("MoE" in line for line in equations(placement_of(model)))
