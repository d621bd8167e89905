"""The page printed before training: what will be trained, how, on what, and for how long, as text."""

from collections.abc import Mapping

from megnorm import __version__
from megnorm.config import Config
from megnorm.norms import equations, find_scheme, init_policy, placement_of
from megnorm.observe.humanize import count
from megnorm.plan.flops import flops_per_step, flops_per_token
from megnorm.plan.layout import Layout, accumulation_steps
from megnorm.plan.parameters import parameter_table
from megnorm.plan.schedule import decay_steps, warmup_steps

LABEL = 14
RECOMPUTED = {"none": "", "selective": ", attention core recomputed", "full": ", blocks recomputed"}


def first_page(config: Config, layout: Layout, peak: tuple[float | None, str], start_step: int = 0,
               extra: Mapping[str, str] | None = None) -> list[str]:
    """Lines of the page.

    peak: TFLOP/s of one device and where the figure is from, see ``peak_tflops``. extra: further lines by
    label, such as what is known only once all is built (device, kernels of the norms, sizes of the data).
    """
    lines = [f"megnorm {__version__}, run directory {config.run_dir}", ""]
    lines += _model(config)
    rest = {**_run(config, layout, start_step), **_work(config, layout, peak), **(extra or {})}
    for label, text in rest.items():
        first, *more = text.splitlines()
        lines.append(f"{label:<{LABEL - 1}} {first}")
        lines += [f"{'':<{LABEL}}{line}" for line in more]
    return [*lines, ""]


def _model(config: Config) -> list[str]:
    model = config.model
    table = {part: (number, source) for part, number, source in parameter_table(config)}
    total = table.pop("total")[0]
    non_embedding = table.pop("non_embedding")[0]
    lines = [f"{'model':<{LABEL}}{count(total)} parameters ({total:,}), {count(non_embedding)} of them "
             "outside embedding and output"]
    width = max(len(f"{number:,}") for number, _ in table.values())
    for part, (number, source) in table.items():
        lines.append(f"  {part:<{LABEL - 2}}{number:>{width},}  {source}")
    lines.append(f"{'norms':<{LABEL}}{model.norm.scheme}: {find_scheme(model.norm.scheme).summary}"
                 f"{', with overrides' if model.norm.overrides else ''}")
    lines += [f"  {line}" for line in equations(placement_of(model), model.moe)]
    return [*lines, f"{'initial values':<{LABEL}} {init_policy(model)}, seed {config.seed}"]


def _run(config: Config, layout: Layout, start_step: int) -> dict[str, str]:
    train, accumulation = config.train, accumulation_steps(config, layout)
    total, per_step = config.total_steps, config.tokens_per_step
    left = f", {total - start_step:,} left after step {start_step:,}" if start_step else ""
    return {
        "layout": f"{layout.world} processes: {layout}; ZeRO stage {config.parallel.zero_stage}, "
                  f"{train.dtype}"
                  f"{RECOMPUTED[config.parallel.recompute]}",
        "batch": f"{train.global_batch} sequences of {config.data.sequence_length} tokens = dp {layout.replicas} x "
                 f"accumulation {accumulation} x micro batch {train.micro_batch}: {per_step:,} tokens a step",
        "duration": f"{total:,} steps{left}: {count(total * train.global_batch)} samples, "
                    f"{count(total * per_step)} tokens",
        "schedule": _schedule(config),
    }


def _schedule(config: Config) -> str:
    schedule, peak = config.schedule, config.optimizer.lr
    parts = [f"{schedule.kind}, peak {peak:g}"]
    if warmup_steps(config):
        parts.append(f"warm-up over {warmup_steps(config):g} steps")
    if schedule.kind == "wsd":
        parts.append(f"decay over the last {decay_steps(config):g}")
    if schedule.kind != "constant":
        parts.append(f"down to {schedule.min_lr:g}")
    return ", ".join(parts)


def _work(config: Config, layout: Layout, peak: tuple[float | None, str]) -> dict[str, str]:
    value, origin = peak
    flops, step = flops_per_token(config), flops_per_step(config)
    return {
        "FLOPs": f"{flops.formula}\n({flops.legend})\n"
                 f"{step:.3g} a step, {step * config.total_steps:.3g} in all",
        "MFU": f"of {layout.world} x {value:.3g} TFLOP/s, {origin}" if value else f"not shown: {origin}",
    }
