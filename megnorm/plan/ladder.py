"""A ladder of model sizes by stated rules, each of which the user can change.

Shape: of all widths (see WIDTHS), with the depth that brings the parameters closest to the wanted number,
the one whose width / depth is closest to ``aspect`` among those within 5 % of the number. Loss depends weakly
on this ratio (arXiv:2001.08361, figure 5); 96 is that of HybridNorm's 550M model (arXiv:2503.04598, Table 9),
whose others have 64 to 128. Heads of 64 channels, of 128 from width 2048 on (arXiv:2005.14165, Table 2.1;
arXiv:2501.00656), about a quarter as many key-value heads (arXiv:2305.13245): the nearest power of two, which
tensor parallelism can cut. FFN 8/3 of the width, for SwiGLU (arXiv:2002.05202), in steps of 64. Embeddings
tied below 2B parameters, as in HybridNorm's and OLMo 2's models.

Tokens: 20 for each parameter (arXiv:2203.15556). Learning rate and batch: see RATES.
"""

import difflib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from megnorm.config import Config, ConfigError, dump_config, parse_config
from megnorm.config.config import apply_override
from megnorm.plan.flops import flops_per_token
from megnorm.plan.parameters import count_parameters

# Small models in fine steps; larger ones so that tensor parallelism can cut them.
WIDTHS = (*range(128, 512, 64), *range(512, 1024, 128), *range(1024, 2048, 256), *range(2048, 32769, 512))
FFN_STEP, TOLERANCE, UNTIED_FROM = 64, 0.05, 2e9
SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


class Rate(NamedTuple):
    """Peak and last learning rate, and the tokens of a batch."""

    peak: float
    last: float
    batch_tokens: float


def step_law(parameters: float, tokens: float, compute: float) -> Rate:
    """Peak 1.79 N^-0.713 D^0.307, batch 0.58 D^0.571 tokens, last rate 1e-5; N without embeddings, and at
    least the 60M at which the law's data begin."""
    return Rate(1.79 * max(parameters, 6e7)**-0.713 * tokens**0.307, 1e-5, 0.58 * tokens**0.571)


def deepseek(parameters: float, tokens: float, compute: float) -> Rate:
    """Peak 0.3118 C^-0.1250, batch 0.2920 C^0.3271 tokens, C the FLOPs of the run; the last rate a tenth."""
    peak = 0.3118 * compute**-0.1250
    return Rate(peak, peak / 10, 0.2920 * compute**0.3271)


def paper(parameters: float, tokens: float, compute: float) -> Rate:
    """Peak 3e-4, last 3e-5, batch 1024 x 4096 tokens at every size."""
    return Rate(3e-4, 3e-5, 1024 * 4096)


RATES: dict[str, tuple[Callable[[float, float, float], Rate], str]] = {
    "step-law": (step_law, "arXiv:2503.04715"),
    "deepseek": (deepseek, "arXiv:2401.02954"),
    "paper": (paper, "arXiv:2503.04598, Table 10"),
}


@dataclass(frozen=True)
class Rules:
    """What the sizes follow; see the head of this module. count: which parameters the wanted numbers mean."""

    count: str = "total"
    aspect: float = 96.0
    head_size: int | None = None
    queries_per_kv: int = 4
    ffn_ratio: float = 8 / 3
    vocabulary: int = 100278
    sequence_length: int = 4096
    tokens_per_parameter: float = 20.0
    rate: str = "step-law"
    scheme: str = "hybrid_star"

    def __post_init__(self) -> None:
        for name in ("aspect", "queries_per_kv", "ffn_ratio", "vocabulary", "sequence_length",
                     "tokens_per_parameter"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name}={getattr(self, name)} must be above 0 and finite")
        if self.head_size is not None and (self.head_size < 2 or self.head_size % 2):
            raise ConfigError(f"head_size={self.head_size} must be even: rotary positions turn pairs")
        if self.rate not in RATES:
            raise ConfigError(f"rate={self.rate!r}: there are {', '.join(RATES)}")
        if self.count not in ("total", "non_embedding"):
            raise ConfigError(f"count={self.count!r}: there are total, non_embedding")


def read_size(text: str) -> float:
    """"20M" -> 2e7, "1.2B" -> 1.2e9, "3e8" -> 3e8. Raises ConfigError."""
    number, factor = (text[:-1], SUFFIXES[text[-1].upper()]) if text[-1:].upper() in SUFFIXES else (text, 1.0)
    try:
        size = float(number) * factor
    except ValueError:
        raise ConfigError(f"can't read the size {text!r}; write 20M, 1.2B or 3e8") from None
    if not 0 < size < math.inf:
        raise ConfigError(f"the size {text!r} must be above 0")
    return size


def sizes_between(first: float, last: float, per_decade: int) -> list[float]:
    """first * 10^(i / per_decade) up to last."""
    if last < first:
        raise ConfigError(f"the ladder goes up: from {first:g} to {last:g} is no ladder")
    if per_decade < 1:
        raise ConfigError(f"per-decade={per_decade} must be at least 1")
    steps = math.floor(per_decade * math.log10(last / first) + 1e-9)
    return [first * 10 ** (i / per_decade) for i in range(steps + 1)]


def size_name(size: float) -> str:
    """2e7 -> "20m", 1.12e9 -> "1.1b"."""
    unit = next(u for u in ("T", "B", "M", "K") if size >= SUFFIXES[u] * 0.9995 or u == "K")
    value = size / SUFFIXES[unit]
    digits = 0 if value >= 10 or abs(value - round(value)) < 0.05 else 1
    return f"{value:.{digits}f}{unit}".lower()


def make_rung(wanted: float, rules: Rules) -> Config:
    """The configuration of the size that is closest to ``wanted`` parameters by the rules."""
    model = choose_shape(wanted, rules)
    name = size_name(wanted)
    raw: dict[str, Any] = {
        "run_dir": f"runs/ladder/{name}",
        "model": model,
        "data": {"sequence_length": rules.sequence_length, "train": "data/pretrain/train_text_document"},
        "train": {"tokens": 1, "micro_batch": 1, "global_batch": 1, "dtype": "bf16"},
        "optimizer": {"lr": 1.0, "decay_norms": True},
        "schedule": {"kind": "cosine"},
        "checkpoint": {"every": 1000},
    }
    shape = parse_config(raw, f"the rung {name}")
    counts = count_parameters(shape)
    tokens = round(rules.tokens_per_parameter * counts[rules.count])
    rate = RATES[rules.rate][0](counts["non_embedding"], tokens, flops_per_token(shape).total * tokens)
    batch = max(8, round(rate.batch_tokens / rules.sequence_length / 8) * 8)
    steps = -(-tokens // (batch * rules.sequence_length))
    raw["train"] |= {"tokens": tokens, "global_batch": batch, "micro_batch": min(8, batch)}
    raw["optimizer"]["lr"] = float(f"{rate.peak:.3g}")
    raw["schedule"] |= {"min_lr": float(f"{min(rate.last, rate.peak):.3g}"),
                        "warmup_tokens": min(steps // 10, 2000) * batch * rules.sequence_length}
    return parse_config(raw, f"the rung {name}")


def read_rules(changes: list[str]) -> Rules:
    """Rules with ``key=value`` changes. Raises ConfigError with the nearest right name."""
    types = {field.name: field.type for field in fields(Rules)}
    values: dict[str, Any] = {}
    for change in changes:
        name, sign, text = change.partition("=")
        if not sign or name not in types:
            near = difflib.get_close_matches(name, types, n=1)
            hint = f"did you mean {near[0]}=...?" if near else f"there are {', '.join(types)}"
            raise ConfigError(f"rule {change!r}: {hint}")
        try:
            values[name] = types[name](text) if types[name] in (str, float) else int(text)
        except ValueError:
            raise ConfigError(f"rule {change!r}: {text!r} is not a number") from None
    return Rules(**values)


def make_ladder(first: str, last: str, per_decade: int, rules: Rules, overrides: list[str]) -> list[Config]:
    """A configuration for each size from ``first`` to ``last``, with ``key=value`` overrides in all."""
    configs = []
    for size in sizes_between(read_size(first), read_size(last), per_decade):
        raw = make_rung(size, rules).model_dump(mode="json")
        for override in overrides:
            apply_override(raw, override)
        configs.append(parse_config(raw, f"the rung {size_name(size)}"))
    return configs


def ladder_text(configs: list[Config]) -> str:
    """The configurations as YAML documents."""
    return "---\n".join(dump_config(config) for config in configs)


def write_ladder(configs: list[Config], folder: str) -> list[Path]:
    """A file for each size, named by it. Raises ConfigError when it is there or the folder can't be written."""
    paths = [Path(folder) / f"{Path(config.run_dir).name}.yaml" for config in configs]
    if there := [path for path in paths if path.exists()]:
        raise ConfigError(f"{there[0]} is there already: name another folder with --output")
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for path, config in zip(paths, configs, strict=True):
            path.write_text(dump_config(config), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"can't write into {folder} ({error.strerror}); choose another --output") from None
    return paths


def choose_shape(wanted: float, rules: Rules) -> dict[str, Any]:
    """The model section of a size. Raises ConfigError when no shape comes within 20 % of it."""
    shapes = list(_shapes(wanted, rules))
    if not shapes:
        raise ConfigError(f"no model of {wanted:g} parameters: the smallest embedding alone has "
                          f"{rules.vocabulary * WIDTHS[0]:,}; take a smaller vocabulary or count=non_embedding")
    close = [shape for shape in shapes if shape.off <= TOLERANCE]
    best = min(close, key=lambda s: s.skew) if close else min(shapes, key=lambda s: s.off)
    if best.off > 0.2:
        raise ConfigError(f"no model of {wanted:g} parameters by these rules; the nearest has {best.parameters:,}")
    return best.model


class _Shape(NamedTuple):
    off: float
    skew: float
    parameters: int
    model: dict[str, Any]


def _shapes(wanted: float, rules: Rules) -> Iterator[_Shape]:
    """For each width the depth that comes closest to the wanted parameters."""
    for hidden in WIDTHS:
        head_size = rules.head_size or (64 if hidden < 2048 else 128)
        if hidden % head_size:
            continue
        one, two = (_count(wanted, hidden, head_size, layers, rules) for layers in (1, 2))
        if one > 1.2 * wanted:
            return
        layers = max(1, round((wanted - one) / (two - one)) + 1)
        model = _model(wanted, hidden, head_size, layers, rules)
        parameters = one + (layers - 1) * (two - one)
        if layers <= 8 * hidden / rules.aspect:
            skew = abs(math.log(hidden / layers / rules.aspect))
            yield _Shape(abs(parameters / wanted - 1), skew, parameters, model)


def _count(wanted: float, hidden: int, head_size: int, layers: int, rules: Rules) -> int:
    """Matrices only: norms are below a thousandth."""
    model = _model(wanted, hidden, head_size, layers, rules)
    heads, kv, ffn = model["heads"], model["kv_heads"], model["ffn_hidden"]
    blocks = layers * (2 * (heads + kv) * head_size * hidden + 3 * hidden * ffn)
    rows = -(-rules.vocabulary // 128) * 128 * (1 if model["tie_embeddings"] else 2)
    return blocks + (rows * hidden if rules.count == "total" else 0)


def _model(wanted: float, hidden: int, head_size: int, layers: int, rules: Rules) -> dict[str, Any]:
    heads = hidden // head_size
    fitting = [n for n in (2**i for i in range(heads.bit_length())) if heads % n == 0]
    kv_heads = min(fitting, key=lambda n: abs(math.log(n * rules.queries_per_kv / heads)))
    return {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "head_size": head_size,
            "ffn_hidden": math.ceil(rules.ffn_ratio * hidden / FFN_STEP) * FFN_STEP,
            "vocab_size": rules.vocabulary, "tie_embeddings": wanted < UNTIED_FROM, "rope_theta": 500000.0,
            "norm": rules.scheme}


def ladder_table(configs: list[Config]) -> list[str]:
    """Lines of a table for people."""
    rows = [("size", "parameters", "non-embedding", "layers", "hidden", "heads/kv", "ffn", "d/L", "lr",
             "batch", "tokens", "FLOPs")]
    for config in configs:
        model, counts = config.model, count_parameters(config)
        tokens = config.train.tokens or config.total_steps * config.tokens_per_step
        rows.append((Path(config.run_dir).name, f"{counts['total']:,}", f"{counts['non_embedding']:,}",
                     str(model.layers), str(model.hidden), f"{model.heads}/{model.kv_heads}",
                     str(model.ffn_hidden), f"{model.hidden / model.layers:.0f}", f"{config.optimizer.lr:.3g}",
                     f"{config.train.global_batch} x {config.data.sequence_length}", f"{tokens:.3g}",
                     f"{flops_per_token(config).total * tokens:.3g}"))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
