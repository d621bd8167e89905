"""Parameters and memory of a rank: against the parts that ranks would build, and against arithmetic by hand."""

import pytest

from megnorm.config import Config, parse_config
from megnorm.dry_run import report_lines, run_dry
from megnorm.norms.schemes import SCHEMES
from megnorm.plan.layout import make_layout
from megnorm.plan.memory import BUCKET, Memory, stage_memory, worst_rank
from megnorm.plan.page import memory_lines, size_text
from megnorm.plan.parameters import count_parameters


def make(parallel: dict | None = None, train: dict | None = None, **model) -> Config:
    sizes = {"layers": 4, "hidden": 64, "heads": 8, "kv_heads": 2, "ffn_hidden": 96, "vocab_size": 250, **model}
    return parse_config({"run_dir": "r", "model": sizes, "data": {"sequence_length": 128, "train": "t"},
                         "parallel": parallel or {}, "optimizer": {"lr": 1.0},
                         "train": {"steps": 10, "micro_batch": 2, "global_batch": 64, **(train or {})}})


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_parameters_are_those_that_ranks_build(scheme: str) -> None:
    for parallel in ({}, {"tp": 4, "pp": 2}, {"tp": 2, "sp": True, "pp": 4}):
        config = make(parallel, norm=scheme, bias=True)
        _, reports = run_dry(config, 8)  # asserts it of each rank and stage
        copies = config.model.padded_vocab * 64 if config.parallel.pp > 1 else 0
        assert sum(report.whole for report in reports) == count_parameters(config)["total"] + copies


@pytest.mark.parametrize("model", [{"tie_embeddings": False}, {"activation": "gelu", "kv_heads": 8}, {"kv_heads": 1}, {
    "norm": {"scheme": "pre", "overrides": {":": {"attention": {
        "q_norm": {"scope": "all_heads"}, "k_norm": {"gain": "per_head"}, "ctx_norm": {"kind": "dyt"},
        "gate": "element", "head_scale": "before"}, "ffn": {"mid_norm": {"kind": "layer", "bias": True}}}}}}])
def test_slots_and_heads_that_are_rare(model: dict) -> None:
    for parallel in ({"tp": 4}, {"pp": 3, "stages": [2, 1, 1]}):
        config = make(parallel, **model)
        _, reports = run_dry(config, 2 * parallel.get("tp", 1) * parallel.get("pp", 1))  # asserts it of each rank
        copies = config.model.padded_vocab * 64 if config.parallel.pp > 1 and config.model.tie_embeddings else 0
        assert sum(report.whole for report in reports) == count_parameters(config)["total"] + copies


MOE = {"experts": 8, "top_k": 2, "ffn_hidden": 24}


@pytest.mark.parametrize("moe", [MOE, {**MOE, "layers": "first dense 2"}, {**MOE, "layers": "every 2", "shared_experts": 2}])
@pytest.mark.parametrize("parallel", [{"ep": 4}, {"tp": 2, "ep": 2, "sp": True}, {"pp": 2, "ep": 8}])
def test_expert_parallel_ranks_hold_their_experts(moe: dict, parallel: dict) -> None:
    config = make(parallel, moe=moe, bias=True, norm="normformer")
    _, reports = run_dry(config, 16)  # asserts it of each rank and stage
    copies = config.model.padded_vocab * 64 if config.parallel.pp > 1 else 0
    assert sum(report.whole for report in reports) == count_parameters(config)["total"] + copies


def test_experts_are_sharded_over_fewer_ranks() -> None:
    """ZeRO 1: masters and moments, 12 bytes, of common parameters over 8 ranks, of experts over the 2 that hold them."""
    config = make({"zero_stage": 1, "ep": 4}, moe=MOE)
    counts = count_parameters(config)
    memory = stage_memory(config, make_layout(config, 8), 0)
    common, experts = counts["total"] - counts["experts"], counts["experts"] // 4
    assert memory.weights == 4 * (common + experts)
    assert memory.optimizer == pytest.approx(12 * (common / 8 + experts / 2), rel=1e-6)


def test_thousands_of_ranks_without_starting_them() -> None:
    layout, reports = run_dry(make({"tp": 4, "pp": 4}, {"global_batch": 2048}), 4096)
    lines = report_lines(make({"tp": 4, "pp": 4}), layout, reports)
    assert layout.dp == 256 and [report.ranks for report in reports] == [1024] * 4
    assert "4,096 ranks" in lines[0] and "embedding .. layers.0" in lines[2] and "layers.3 .. output" in lines[5]
    total = count_parameters(make())["total"]
    assert lines[-1].startswith(f"all stages: {total:,} parameters, and {256 * 64:,} in")


@pytest.mark.parametrize("dtype, stage, weights, gradients, optimizer, bucket", [
    ("fp32", 0, 4, 4, 8, 0),
    ("fp32", 1, 4, 4, 12 / 8, 4 * BUCKET),
    ("fp32", 2, 4, 4 / 8, 12 / 8, 4 * BUCKET),
    ("fp32", 3, 4 / 8, 4 / 8, 12 / 8, 4 * BUCKET),
    ("bf16", 0, 2, 4, 12 / 8, 0),
    ("bf16", 1, 2, 4, 12 / 8, 0),
    ("bf16", 2, 2, 4 / 8, 12 / 8, 2 * BUCKET),
    ("bf16", 3, 2 / 8, 4 / 8, 12 / 8, 4 * BUCKET),
])
def test_bytes_of_a_parameter(dtype, stage, weights, gradients, optimizer, bucket) -> None:
    config = make({"zero_stage": stage}, {"dtype": dtype})
    memory = stage_memory(config, make_layout(config, 8), 0)
    count = count_parameters(config)["total"]
    assert memory.moment == "cross entropy"
    assert (memory.weights, memory.optimizer) == (pytest.approx(weights * count), pytest.approx(optimizer * count))
    assert memory.gradients == pytest.approx(gradients * count) and memory.bucket == bucket
    assert memory.gathered == ((2 if dtype == "bf16" else 4) * count if stage == 3 else 0)


def test_activations_by_hand() -> None:
    """fp32, one rank, Pre-Norm, sequences of 128: two blocks of queries that see 64 and 128 keys."""
    config = make({"zero_stage": 0}, norm="pre")
    t, d, f, kv = 2 * 128, 64, 96, 16
    attention = t * (2 * d + 1 + d + 2 * kv + d) + 2 * 8 * (64 * 64 + 64 * 128)
    ffn = t * (2 * d + 1 + 4 * f)
    ends = t * (2 * d + 1) + t * 18 // 4
    batches = 20 * t * 32
    memory = stage_memory(config, make_layout(config, 1), 0, "cpu")
    assert memory.activations == 4 * (4 * (attention + ffn) + ends) + batches
    logits = t * 256
    assert memory.logits == 4 * (logits + logits + logits)


def test_what_saves_memory_saves_it() -> None:
    def peak(parallel: dict, world: int = 8, device: str = "cuda") -> Memory:
        config = make(parallel, {"dtype": "bf16"})
        return worst_rank(config, make_layout(config, world), device)

    whole = peak({})
    assert peak({"recompute": "full"}).activations < whole.activations / 2
    assert peak({"tp": 2}).activations < whole.activations and peak({"tp": 2}).logits == whole.logits / 2
    assert peak({"tp": 2, "sp": True}).activations < peak({"tp": 2}).activations
    assert peak({"cp": 2}).activations < 0.6 * whole.activations
    assert peak({"pp": 4}).weights < whole.weights and peak({"pp": 4}).stage == 0
    assert peak({}, device="cpu").activations > whole.activations


def test_lines_for_people() -> None:
    config = make({"zero_stage": 3})
    memory = worst_rank(config, make_layout(config, 2))
    text = "\n".join(memory_lines(memory))
    assert "gathered weights" in text and "reduce bucket" in text and f"{size_text(memory.total)}, at: " in text
    assert size_text(3 * 2**30) == "3.00 GiB" and size_text(2**20) == "1.0 MiB"
