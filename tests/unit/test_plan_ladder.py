"""Sizes between the rungs of a ladder: spacing, shape, rates, mistakes."""

import math

import pytest

from megnorm.config import ConfigError, dump_config, load_config
from megnorm.plan.ladder import (
    Rules,
    ladder_table,
    ladder_text,
    make_ladder,
    make_rung,
    read_rules,
    read_size,
    size_name,
    sizes_between,
    write_ladder,
)
from megnorm.plan.parameters import count_parameters
from megnorm.plan.schedule import check_schedule, warmup_steps


def test_even_steps_on_a_logarithmic_scale() -> None:
    sizes = sizes_between(2e7, 7e9, 4)
    assert len(sizes) == 11 and sizes[0] == 2e7 and sizes[4] == pytest.approx(2e8) and sizes[-1] <= 7e9
    assert sizes_between(1e8, 1e9, 2)[-1] == pytest.approx(1e9)
    assert [size_name(size) for size in sizes[:4]] == ["20m", "36m", "63m", "112m"] and size_name(1.12e9) == "1.1b"


@pytest.mark.parametrize("text, size", [("20M", 2e7), ("1.2b", 1.2e9), ("3e8", 3e8), ("500k", 5e5)])
def test_sizes_are_read(text: str, size: float) -> None:
    assert read_size(text) == pytest.approx(size)


@pytest.mark.parametrize("count", ["total", "non_embedding"])
def test_rungs_have_the_wanted_size_and_shape(count: str) -> None:
    for wanted in sizes_between(2e7, 7e9, 4):
        config = make_rung(wanted, Rules(count=count))
        model = config.model
        assert count_parameters(config)[count] == pytest.approx(wanted, rel=0.06)
        assert 64 <= model.hidden / model.layers <= 160
        assert model.head_size == (64 if model.hidden < 2048 else 128) and model.heads * model.head_size == model.hidden
        assert model.kv_heads & (model.kv_heads - 1) == 0 and (model.hidden < 512 or model.kv_heads >= 2)
        assert 8 / 3 <= model.ffn_hidden / model.hidden < 3.1 and model.tie_embeddings == (wanted < 2e9)
        check_schedule(config)


def test_step_law_by_hand() -> None:
    config = make_rung(1e9, Rules())
    n, tokens = count_parameters(config)["non_embedding"], 20 * count_parameters(config)["total"]
    assert config.train.tokens == tokens
    assert config.optimizer.lr == pytest.approx(1.79 * n**-0.713 * tokens**0.307, rel=5e-3)
    assert config.tokens_per_step == pytest.approx(0.58 * tokens**0.571, rel=0.05)
    assert config.schedule.min_lr == 1e-5 and warmup_steps(config) == min(config.total_steps // 10, 2000)


def test_other_rates_and_rules() -> None:
    deepseek = make_rung(1e9, Rules(rate="deepseek"))
    rate = deepseek.optimizer.lr
    assert rate > 3e-4 and deepseek.schedule.min_lr == pytest.approx(rate / 10, rel=1e-2)
    fixed = make_rung(1e9, Rules(rate="paper", tokens_per_parameter=200, aspect=64, head_size=32, scheme="peri"))
    assert fixed.optimizer.lr == 3e-4 and fixed.train.global_batch == 1024 and fixed.model.head_size == 32
    assert fixed.model.hidden / fixed.model.layers < 80 and fixed.model.norm.scheme == "peri"


def test_rungs_are_files_that_load(tmp_path) -> None:
    config = make_rung(1e8, Rules())
    (tmp_path / "100m.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "100m.yaml") == config
    assert len(ladder_table([config, config])) == 3 and len(set(map(len, ladder_table([config])))) == 1


@pytest.mark.parametrize("mistake, words", [
    (lambda: read_size("20X"), "20M, 1.2B"),
    (lambda: read_size("-3M"), "above 0"),
    (lambda: sizes_between(1e9, 1e8, 4), "goes up"),
    (lambda: make_rung(1e6, Rules()), "non_embedding"),
    (lambda: Rules(rate="linear"), "step-law"),
    (lambda: Rules(count="active"), "non_embedding"),
    (lambda: Rules(head_size=33), "even"),
    (lambda: Rules(ffn_ratio=0.0), "above 0"),
    (lambda: sizes_between(1e8, 1e9, 0), "per-decade"),
    (lambda: Rules(aspect=math.inf), "finite"),
])
def test_mistakes_have_one_message(mistake, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        mistake()


def test_command_line_rules_and_files(tmp_path) -> None:
    rules = read_rules(["aspect=64", "rate=paper", "head_size=32", "count=non_embedding"])
    assert rules == Rules(aspect=64.0, rate="paper", head_size=32, count="non_embedding")
    configs = make_ladder("100M", "400M", 2, rules, ["model.norm=peri", "data.train=mine"])
    paths = write_ladder(configs, str(tmp_path / "sizes"))
    assert [path.name for path in paths] == ["100m.yaml", "316m.yaml"]
    assert [load_config(path) for path in paths] == configs and configs[0].model.norm.scheme == "peri"
    assert ladder_text(configs).count("run_dir") == 2
    for mistake, words in ((lambda: read_rules(["aspct=3"]), "did you mean aspect"),
                           (lambda: read_rules(["aspect=wide"]), "not a number"),
                           (lambda: write_ladder(configs, str(tmp_path / "sizes")), "there already"),
                           (lambda: write_ladder(configs, "/proc/none"), "can't write")):
        with pytest.raises(ConfigError, match=words):
            mistake()
