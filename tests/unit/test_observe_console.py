"""The first page, the lines of a log, the bar on a terminal, and numbers as people read them."""

import inspect
import io

import pytest
import torch

from megnorm.config import Config, parse_config
from megnorm.observe.console import Console, NullConsole
from megnorm.observe.humanize import count, duration, percent, speed
from megnorm.observe.peak import peak_tflops, table_tflops
from megnorm.plan.flops import flops_per_token
from megnorm.plan.layout import make_layout


def make(**sections) -> Config:
    return parse_config({
        "run_dir": "runs/x",
        "model": {"layers": 4, "hidden": 64, "heads": 4, "kv_heads": 2, "vocab_size": 250,
                  "norm": "hybrid_star"},
        "data": {"sequence_length": 32, "train": "t"},
        "train": {"steps": 300, "micro_batch": 2, "global_batch": 16}, "optimizer": {"lr": 3e-3},
        "schedule": {"warmup_steps": 30, "min_lr": 3e-4}, **sections})


def row(step: int) -> dict:
    return {"step": step, "samples": 16 * step, "tokens": 512 * step, "loss": 4.3789, "grad_norm": 1.25,
            "lr": 2.5e-3, "step_seconds": 0.5, "tokens_per_second": 8500.4, "mfu": 0.4123}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(config: Config, stream: io.StringIO, steps: int = 3) -> str:
    console = Console(config, make_layout(config, 2), stream)
    console.first_page((0.5, "measured"), extra={"norm kernels": "rms: torch"})
    for step in range(1, steps + 1):
        console.step(row(step), 300)
    console.evaluation(3, "valid", 4.5)
    console.note("checkpoint saved: step-00000003")
    console.close("done")
    console.close()
    return stream.getvalue()


def test_first_page_says_what_will_be_trained() -> None:
    config = make()
    text = shown(config, io.StringIO())
    for words in ("256 rows (250 tokens padded to a multiple of 128) x 64", "2 processes: TP=1 PP=1 DP=2",
                  "ZeRO stage 1, fp32", "dp 2 x accumulation 4 x micro batch 2: 512 tokens a step",
                  "300 steps: 4,800 samples, 153.6K tokens", "warm-up over 30 steps", "layers 1-3:",
                  "x = RMSNorm(x) + FFN(RMSNorm(x))", flops_per_token(config).formula, "norm kernels",
                  "of 2 x 0.5 TFLOP/s, measured"):
        assert words in text, words


def test_first_page_after_a_resume_and_on_an_unknown_device() -> None:
    stream = io.StringIO()
    console = Console(make(), make_layout(make(), 2), stream)
    console.first_page((None, "no figure known for X"), start_step=100)
    assert "200 left after step 100" in stream.getvalue()
    assert "not shown: no figure known" in stream.getvalue()


def test_a_log_has_one_plain_line_a_row() -> None:
    text = shown(make(), io.StringIO())
    assert "\x1b" not in text
    lines = [line for line in text.splitlines() if line.startswith("step ") and "|" in line]
    assert lines[1] == ("step   2/300 | loss 4.3789 | lr 2.500e-03 | grad norm 1.250 | 8,500 tokens/s | "
                        "MFU 41.2% | 1,024 tokens | ETA 2 min 29 s") and len(lines) == 3
    for words in ("estimated time: 2 min 28 s more", "step 3: valid loss 4.5000", "checkpoint saved", "done"):
        assert text.count(words) == 1, words


def test_a_terminal_has_a_bar() -> None:
    text = shown(make(), Terminal())
    assert "step 3/300" in text and "loss 4.3789  8,500 tokens/s  ETA 2 min 28 s" in text
    assert "grad norm" not in text and "valid loss 4.5000" in text and text.endswith("done\n")


def test_other_ranks_show_nothing_with_the_same_calls(capsys) -> None:
    for name, method in inspect.getmembers(Console, inspect.isfunction):
        if not name.startswith("_"):
            assert inspect.signature(getattr(NullConsole, name)) == inspect.signature(method), name
    null = NullConsole()
    null.first_page((None, "")), null.step(row(1), 2), null.evaluation(1, "valid", 1.0)
    null.note("x"), null.close("done")
    assert capsys.readouterr().out == ""


def test_numbers_for_people() -> None:
    assert [count(n) for n in (0, 8500, 9999, 41_000, 999_960, 151_400_000, 2.7e9, 1.2e12)] == [
        "0", "8,500", "9,999", "41.0K", "1.0M", "151.4M", "2.7B", "1.2T"]
    assert [duration(s) for s in (0.25, 9.96, 59.6, 200, 3599.7, 3630, 90_000, float("inf"))] == [
        "0.25 s", "10 s", "1 min", "3 min 20 s", "1 h", "1 h", "1 d 1 h", "unknown"]
    assert speed(8500.4) == "8,500 tokens/s" and speed(0.5) == "0.50 tokens/s" and percent(0.4123) == "41.2%"


def test_peak_comes_from_the_config_the_table_or_a_short_product() -> None:
    cpu = torch.device("cpu")
    assert peak_tflops(make(observe={"peak_tflops": 7.0}), cpu) == (7.0, "observe.peak_tflops")
    value, origin = peak_tflops(make(), cpu)
    assert 1e-4 < value < 100 and "fp32 matrix product" in origin
    assert table_tflops("NVIDIA H100 80GB HBM3", "bf16") == 989.0 == table_tflops("NVIDIA H200", "bf16")
    assert table_tflops("NVIDIA H100 PCIe", "bf16") == 756.0 and table_tflops("Tesla T4", "bf16") is None
    assert table_tflops("NVIDIA A100-SXM4-80GB", "fp32") == pytest.approx(156.0)
