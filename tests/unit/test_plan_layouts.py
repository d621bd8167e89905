"""Layouts of a number of devices: all of them, ranked, with reasons; hardware; the parts of the estimate."""

from dataclasses import replace
from pathlib import Path

import pytest

from megnorm.config import Config, ConfigError, load_config, parse_config
from megnorm.plan.estimate import StepTime, step_time
from megnorm.plan.flops import flops_per_step
from megnorm.plan.hardware import TABLE, Hardware, find_hardware, measured_cpu, with_memory
from megnorm.plan.layout import check_layout, make_layout
from megnorm.plan.layouts import USABLE, search_layouts
from megnorm.plan.page import plan_page

LADDER = Path(__file__).resolve().parents[2] / "configs" / "ladder"
H100 = TABLE["h100"]


def make(parallel: dict | None = None, moe: dict | None = None, **train) -> Config:
    model = {"layers": 4, "hidden": 256, "heads": 8, "kv_heads": 4, "ffn_hidden": 768, "moe": moe, "vocab_size": 4096}
    return parse_config({"run_dir": "r", "model": model, "data": {"sequence_length": 512, "train": "t"},
                         "parallel": parallel or {}, "optimizer": {"lr": 1.0},
                         "train": {"steps": 10, "micro_batch": 1, "global_batch": 32, "dtype": "bf16", **train}})


def timed(hardware: Hardware = H100, world: int = 8, train: dict | None = None, **parallel) -> StepTime:
    config = make(parallel, **(train or {}))
    return step_time(config, make_layout(config, world), hardware)


def test_every_layout_is_tried_once_and_sorted() -> None:
    found = search_layouts(make(), 8, H100)
    seen = [candidate.overrides for candidate in found.fitting + found.too_large]
    assert len(seen) == len(set(seen)) and found.count == len(seen) + sum(found.refused.values())
    for candidate in found.fitting:
        check_layout(candidate.config, candidate.layout)
        assert candidate.layout.world == 8
    assert [c.time.total for c in found.fitting] == sorted(c.time.total for c in found.fitting)
    shapes = {(c.layout.tp, c.layout.sp, c.layout.pp, c.layout.cp) for c in found.fitting}
    assert {(1, False, 1, 1), (8, True, 1, 1), (2, False, 4, 1), (2, True, 2, 2), (1, False, 1, 4)} <= shapes
    assert {c.config.parallel.zero_stage for c in found.fitting} == {1, 2, 3}  # bf16 without ZeRO runs as stage 1
    assert {c.config.train.micro_batch for c in found.fitting} >= {1, 2, 4}


def test_overrides_lead_to_the_candidate(tmp_path) -> None:
    config = load_config(LADDER / "151m.yaml")
    for candidate in search_layouts(config, 4, H100).fitting[:20]:
        again = load_config(LADDER / "151m.yaml", candidate.overrides.split())
        assert again == candidate.config and make_layout(again, 4) == candidate.layout


def test_memory_decides_what_fits() -> None:
    roomy, tight = (search_layouts(make(), 8, with_memory(H100, gib)) for gib in (80.0, 0.5))
    assert not roomy.too_large and tight.fitting and tight.too_large and tight.refused == roomy.refused
    limit = 0.5 * 2**30 * USABLE
    assert max(c.memory.total for c in tight.fitting) <= limit < tight.too_large[0].memory.total
    assert [c.memory.total for c in tight.too_large] == sorted(c.memory.total for c in tight.too_large)


def test_reasons_are_those_of_training() -> None:
    reasons = "\n".join(search_layouts(make(), 16, H100).refused)
    for words in ("doesn't go with parallel.pp", "model.heads=8 is not divisible by parallel.tp=16",
                  "is more than model.layers=4", "exchanges tokens for heads"):
        assert words in reasons
    assert "is not divisible by micro_batch" in "\n".join(search_layouts(make(global_batch=30), 4, H100).refused)


def test_page_says_all() -> None:
    config = make()
    lines = plan_page(config, search_layouts(config, 8, with_memory(H100, 0.5)), 8, with_memory(H100, 0.5), 2)
    text = "\n".join(lines)
    for words in ("6 N = ", "12 L H e s", "the configuration's own layout", "masters and moments", "8 x H100, 0.5 GiB",
                  "parallel.tp=", "need too much memory", "can't be", "other reasons"):
        assert words in text
    assert "own layout on 7 devices: train.global_batch=32" in "\n".join(
        plan_page(config, search_layouts(config, 7, H100), 7, H100, 3))
    nothing = with_memory(H100, 0.001)
    assert "  none" in plan_page(config, search_layouts(config, 8, nothing), 8, nothing, 3)


def test_parts_of_a_step() -> None:
    alone = timed(world=1)
    assert alone.tensor == alone.pipeline == alone.bubble == alone.context == alone.data == 0
    config = make()
    assert alone.compute > flops_per_step(config) / H100.flops("bf16") * 0.8
    assert alone.mfu == pytest.approx(flops_per_step(config) / alone.total / H100.flops("bf16"))
    assert alone.tokens_per_second == pytest.approx(32 * 512 / alone.total)
    assert timed(tp=2).tensor > 0 and timed(cp=2).context > 0 and timed().data > 0
    pipe = timed(pp=4)
    assert pipe.bubble == pytest.approx(3 / 16 * (pipe.compute + pipe.tensor + pipe.context + pipe.pipeline))
    again = timed(recompute="full")
    assert again.compute > timed(recompute="selective").compute > timed().compute
    assert again.mfu * again.total == pytest.approx(timed().mfu * timed().total)  # repeated work is not useful work
    assert timed(zero_stage=3).data > timed(zero_stage=1).data
    assert timed(tp=4, recompute="full").tensor == pytest.approx(timed(tp=4).tensor * 26 / 18)


MOE = {"experts": 8, "top_k": 2, "ffn_hidden": 384}


def test_layouts_with_experts() -> None:
    config = make(moe=MOE)
    found = search_layouts(config, 4, H100)
    assert {c.layout.ep for c in found.fitting} == {1, 2, 4}
    assert all(c.config.parallel.zero_stage < 3 for c in found.fitting if c.layout.ep > 1)
    assert any("parallel.ep=4" in c.overrides for c in found.fitting)
    assert {c.layout.ep for c in search_layouts(make(), 4, H100).fitting} == {1}
    text = "\n".join(plan_page(config, found, 4, H100, 5))
    for words in ("router", "4 layers: 8, of which 2 chosen", "active", "every layer has experts"):
        assert words in text


def test_experts_in_a_step() -> None:
    def timed_moe(ep: int, world: int = 8, **parallel) -> StepTime:
        config = make({"ep": ep, **parallel}, moe=MOE)
        return step_time(config, make_layout(config, world), replace(H100, latency=0.0))

    whole, cut = timed_moe(1), timed_moe(4)
    assert whole.expert == 0 < cut.expert and timed().expert == 0
    sent = 4 * 4 * 4 * 3 / 4 * 512 * 2 * 256 * 2  # micro batches, layers, exchanges, to others, tokens, k, d, bytes
    assert cut.expert == pytest.approx(sent / H100.link(4, 1))
    assert timed_moe(4, recompute="full").expert == pytest.approx(1.5 * cut.expert)
    assert cut.data < whole.data  # fewer ranks hold an expert
    assert timed_moe(4, tp=4, world=64).expert > cut.expert  # across nodes


def test_links_inside_and_across_nodes() -> None:
    assert H100.link(8, 1) == 450e9 and H100.link(4, 2) == 450e9 and H100.link(16, 1) == H100.link(2, 8) == 50e9
    small_nodes = replace(H100, per_node=4)
    assert timed(small_nodes, tp=8).tensor > 1.4 * timed(H100, tp=8).tensor
    assert timed(small_nodes, tp=4).tensor == timed(H100, tp=4).tensor
    near, far = (timed(replace(H100, across=speed, latency=0.0), world=16).data for speed in (50.0, 1.0))
    assert far == pytest.approx(50 * near)


def test_hardware_by_name() -> None:
    assert find_hardware("H200").memory > find_hardware("h100").memory
    assert find_hardware("a100").flops("bf16") == 312e12 and find_hardware("a100").flops("fp32") == 156e12
    cpu = measured_cpu(0.01)
    assert cpu.device == "cpu" and 1e8 < cpu.flops("fp32") < 1e14 and 0.1 < cpu.memory < 1e5


@pytest.mark.parametrize("mistake, words", [
    (lambda: find_hardware("h10"), "did you mean h100"),
    (lambda: find_hardware("gaudi"), "a100, h100, h200, b200 and cpu"),
    (lambda: with_memory(H100, 0.0), "above 0"),
    (lambda: with_memory(H100, float("nan")), "above 0"),
    (lambda: search_layouts(make(), 0, H100), "at least 1"),
])
def test_mistakes_have_one_message(mistake, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        mistake()
