"""The command ``megnorm parity``: prove on this machine that layouts agree with one process."""

import math
from collections.abc import Iterator

import torch

from megnorm.config import Config, ConfigError, parse_config
from megnorm.config.config import apply_override
from megnorm.norms import resolve
from megnorm.plan.layout import Layout, check_layout, make_layout
from megnorm.testing.compare import Verdict, judge
from megnorm.testing.parity import in_layout, reference
from megnorm.testing.ranks import run_ranks


def parse_layouts(config: Config, texts: list[str], full: bool) -> list[tuple[str, Config, Layout]]:
    """Each ``tp=2,pp=2,zero_stage=1`` as (text, configuration, layout). Raises ConfigError."""
    runs = []
    for text in texts:
        raw = config.model_dump(mode="json")
        raw["parallel"] = {"timeout_seconds": config.parallel.timeout_seconds}
        for item in text.replace(" ", "").split(","):
            apply_override(raw, f"parallel.{item}")
        runs.append((text, parse_config(raw, f"layout {text!r}")))
    # One global batch for all layouts, which every replica count divides.
    replicas = math.lcm(*(run.parallel.dp or 1 for _, run in runs))
    layouts = []
    for text, run in runs:
        run = run if full else shrink(run)
        train = run.train.model_copy(update={
            "micro_batch": 1, "global_batch": replicas * (-(-8 // replicas)), "dtype": "fp32"})
        run = run.model_copy(update={"train": train})
        parallel = run.parallel
        layout = make_layout(run, parallel.tp * parallel.pp * parallel.cp * (parallel.dp or 1))
        try:
            check_layout(run, layout)
        except ConfigError as error:
            raise ConfigError(f"layout {text!r}: {error}") from None
        layouts.append((text, run, layout))
    resolve(config.model.norm, config.model.layers)
    return layouts


def shrink(config: Config) -> Config:
    """The same depth, heads, norms and activation at the smallest width, vocabulary and length."""
    model, data = config.model.model_dump(), config.data
    head_size = 16  # the least that flex_attention takes on CUDA
    hidden, width = head_size * config.model.heads, 2 * head_size * config.model.heads
    model |= {"head_size": head_size, "hidden": hidden, "ffn_hidden": width, "vocab_size": 125, "pad_vocab_to": 128,
              "init": {**model["init"], "std": None}, "moe": model["moe"] and {**model["moe"], "ffn_hidden": width}}
    return config.model_copy(update={"model": type(config.model).model_validate(model),
                                     "data": data.model_copy(update={"sequence_length": 16})})


def run_parity(runs: list[tuple[str, Config, Layout]]) -> Iterator[tuple[str, Layout, Verdict]]:
    """Train the reference once and each layout after it; yields a verdict as soon as it is known."""
    _, config, _ = runs[0]
    (expected,) = run_ranks(reference, 1, config, timeout=3600)
    for text, run, layout in runs:
        device = "cuda" if torch.cuda.device_count() >= layout.world else "cpu"
        ranks = run_ranks(in_layout, layout.world, run, device, timeout=3600,
                          backend="nccl" if device == "cuda" else "gloo")
        yield text, layout, judge(expected, ranks, layout)


HEADER = f"{'layout':<28} {'ranks':>5}  {'loss':>8}  {'norm':>8}  {'gradient':>8}  {'weight':>8}  verdict"


def row(text: str, layout: Layout, verdict: Verdict) -> str:
    """One line: largest relative differences of loss, gradient norm, a gradient, a weight; then the verdict."""
    (gradient, gradient_name), (weight, _) = verdict.gradient, verdict.weight
    numbers = "  ".join(f"{value:8.1e}" for value in (verdict.loss, verdict.grad_norm, gradient, weight))
    end = f"agrees (worst gradient: {gradient_name})" if verdict.agrees else "DIFFERS"
    return f"{text:<28} {layout.world:>5}  {numbers}  {end}"
