"""The paper's ladder: sizes as printed, hyperparameters, durations in tokens."""

import math
from pathlib import Path

import pytest

from megnorm.config import load_config
from megnorm.norms import init_policy, placement_of
from megnorm.plan.flops import flops_per_token
from megnorm.plan.layout import check_layout, make_layout
from megnorm.plan.parameters import count_parameters
from megnorm.plan.schedule import check_schedule

LADDER = Path(__file__).resolve().parents[2] / "configs" / "ladder"
# Matrices and embedding, in millions, as arXiv:2503.04598 prints them; 2.7b and 7b: of the shapes named in the files.
PRINTED = {"151m": 151.4, "285m": 285.2, "550m": 550.5, "543m-deep": 543.7, "1.2b": 1277, "1.2b-ffn8192": 1179,
           "moe-1b-7b": 6919, "2.7b": 2669, "7b": 7298}


def test_every_file_is_known() -> None:
    assert {path.stem for path in LADDER.glob("*.yaml")} == set(PRINTED)


@pytest.mark.parametrize("name", PRINTED)
def test_parameters_as_printed(name: str) -> None:
    counts = count_parameters(load_config(LADDER / f"{name}.yaml"))
    matrices = sum(counts[part] for part in ("embedding", "attention", "ffn", "router", "experts", "output"))
    digits = 1 if PRINTED[name] < 1000 else 0
    assert round(matrices / 1e6, digits) == PRINTED[name]


@pytest.mark.parametrize("name", PRINTED)
def test_hyperparameters(name: str) -> None:
    config = load_config(LADDER / f"{name}.yaml", ["data.train=elsewhere"])
    assert config.run_dir == f"runs/{name}" and config.model.norm.scheme == "hybrid_star"
    moe = config.model.moe is not None
    rates, warmup = ((4e-4, 4e-5), 2500) if moe else ((3e-4, 3e-5), 2000)
    assert (config.optimizer.lr, config.schedule.min_lr) == rates and config.optimizer.betas == (0.9, 0.95)
    assert config.optimizer.decay_norms and config.optimizer.decay_embeddings == moe
    assert config.tokens_per_step == 1024 * 4096 and config.schedule.warmup_tokens == warmup * config.tokens_per_step
    assert config.train.steps is None and config.train.tokens >= 150e9
    check_schedule(config)
    check_layout(config, make_layout(config, 64))


def test_mixture_of_experts() -> None:
    """6.92B in all, 1.28B of them active (arXiv:2503.04598: 1.282B), each to 0.1 %."""
    config = load_config(LADDER / "moe-1b-7b.yaml")
    counts = count_parameters(config)
    assert counts["total"] == pytest.approx(6.919e9, rel=1e-3) and counts["active"] == pytest.approx(1.282e9, rel=1e-3)
    assert flops_per_token(config).matmul == pytest.approx(6 * (1.282e9 - 50304 * 2048), rel=1e-3)
    moe = config.model.moe
    assert (moe.experts, moe.top_k, moe.ffn_hidden, moe.normalise_top_k) == (64, 8, 1024, False)
    assert config.model.padded_vocab == 50304 and not config.model.tie_embeddings and config.model.rope_theta == 10000
    for ep in (1, 8, 64):
        check_layout(config, make_layout(load_config(LADDER / "moe-1b-7b.yaml", [f"parallel.ep={ep}"]), 64))


def test_initial_values() -> None:
    for name in PRINTED:
        config = load_config(LADDER / f"{name}.yaml")
        expected = ("normal", 0.02) if name == "7b" else ("megatron", None)
        assert (init_policy(config.model), config.model.init.std) == expected


def test_7b_has_the_gain_of_the_paper() -> None:
    blocks = placement_of(load_config(LADDER / "7b.yaml").model).blocks
    assert all(block.attention.out_norm.gain_init == 1 / math.sqrt(2 * 32) for block in blocks)
    assert all(block.attention.out_norm is None
               for block in placement_of(load_config(LADDER / "1.2b.yaml").model).blocks)


def test_demo_of_experts_costs_no_more_than_its_dense_twin() -> None:
    experts, dense = (load_config(LADDER.parent / f"{name}.yaml", ["model.vocab_size=4096"])
                      for name in ("demo-moe", "demo-moe-dense"))
    assert 0.998 < flops_per_token(experts).total / flops_per_token(dense).total <= 1
    assert (experts.model.norm, experts.data, experts.train, experts.optimizer, experts.schedule) == (
        dense.model.norm, dense.data, dense.train, dense.optimizer, dense.schedule)
    check_layout(experts, make_layout(experts, 2))
