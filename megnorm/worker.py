"""What one process of a run does, from its configuration to the end of training."""

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from megnorm.build import build_engine, build_module
from megnorm.checkpoint.load import choose_together, load
from megnorm.config import Config, dump_config
from megnorm.engine.clip import counts_here
from megnorm.engine.engine import Engine
from megnorm.engine.gradients import before_update, squared_norms
from megnorm.engine.products import products_used
from megnorm.engine.settings import zero_stage
from megnorm.engine.start import device_for, finish, start
from megnorm.loop import Run, StopRequest, as_tensors, step_batches, train
from megnorm.model.block import Block
from megnorm.model.core import program
from megnorm.model.norm import kernels_used
from megnorm.model.profile import has_profiled_scales, profile
from megnorm.norms import placement_of
from megnorm.observe.console import Console, NullConsole
from megnorm.observe.metrics import MetricsWriter, NullSink
from megnorm.observe.peak import peak_tflops
from megnorm.observe.probes import Probes
from megnorm.observe.routers import RouterWatch
from megnorm.observe.tensorboard import open_tensorboard
from megnorm.parallel.groups import Groups, make_groups
from megnorm.prepare import CONFIG_FILE, Prepared


def work(prepared: Prepared, resume: str, local_rank: int, report: Callable[[str], None]) -> int:
    """Train. Returns the process's exit code."""
    stop = StopRequest()
    stop.install()
    device = device_for(local_rank)
    report("starting")
    start(device, prepared.config.parallel.timeout_seconds)
    groups = make_groups(prepared.layout, device, prepared.config.model.kv_heads)
    run = open_run(prepared, resume, groups, stop)
    limit_waiting(prepared.config.parallel.timeout_seconds)
    code = train(run, report)
    finish()
    return code


def limit_waiting(seconds: int) -> None:
    """Let every process group, DeepSpeed's own included, give up a peer that is silent for so long.

    A new group doesn't inherit the default group's limit: with gloo it would wait for 30 minutes.
    """
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def open_run(prepared: Prepared, resume: str, groups: Groups, stop: StopRequest) -> Run:
    """Engine, checkpoint, and on rank 0 the console and the files of the run directory."""
    config, first = prepared.config, groups.rank == 0
    console = Console(config, groups.layout) if first else NullConsole()
    choice = choose_together(config.run_dir, resume)
    module = build_module(config, groups)
    if choice.path is None and has_profiled_scales(config.model):
        first_step = as_tensors(step_batches(config, prepared.datasets, groups, 0), groups)
        profile(module, config.model.layers, [inputs for inputs, _, _ in first_step], groups)
    engine = build_engine(config, groups, module)
    notes = [*prepared.datasets.plan, *(f"passed over {path}: {reason}" for path, reason in choice.skipped)]
    step = 0
    if choice.path is not None:
        loaded = load(choice.path, engine.raw, groups)
        step = engine.clock.step = loaded.manifest.step
        notes.append(f"resumed from {choice.path}: {loaded.report}")
        notes += [f"changed since: {change}" for change in prepared.changes]
    stage = zero_stage(config, groups.layout)
    if stage != config.parallel.zero_stage:
        reason = "one replica has nothing to shard" if stage == 0 else "fp32 masters of bf16 weights need it"
        notes.append(f"zero_stage {config.parallel.zero_stage} runs as stage {stage}, with the same values: {reason}")
    sinks = [NullSink()]
    peak = peak_tflops(config, groups.device) if first else (None, "")
    if first:
        write_config(Path(config.run_dir), dump_config(config))
        sinks = [MetricsWriter(config.run_dir, step), open_tensorboard(config, step)]
        console.first_page(peak, step, programs_used(config, module, groups.device, prepared.datasets.rules.documents))
    for note in notes:
        console.note(note)
    dist.barrier()
    return Run(config, groups, engine, prepared.datasets, stop, console, sinks, peak[0],
               make_probes(config, groups, engine),
               RouterWatch(config.observe.routers_every, config.observe.idle_expert_steps), step=step, saved_step=step)


def programs_used(config: Config, module: nn.Module, device: torch.device, documents: bool) -> dict[str, str]:
    """What computes norms, attention and matrix products, for the first page; documents: whether batches tell them."""
    softcap = placement_of(config.model).attention_softcap is not None
    return {"norm kernels": "\n".join(kernels_used(module)),
            "attention": program(device.type, config.data.sequence_length, softcap, documents),
            "products": products_used(device)}


def make_probes(config: Config, groups: Groups, engine: Engine) -> Probes:
    """What ``observe.probe_every`` asks for, watching the engine; a collective call."""
    module = engine.raw.module
    blocks = {block.layer: block for block in module.modules() if isinstance(block, Block)}
    streams = {"single": 1, "residual": 2}[placement_of(config.model).streams]
    names = [p.sharding.name for p in module.parameters() if counts_here(p)]
    probes = Probes(config.observe.probe_every, streams, blocks, names, lambda: squared_norms(engine.raw, groups),
                    groups)
    before_update(engine.raw, probes.gradients_are_whole)
    return probes


def write_config(run_dir: Path, text: str) -> None:
    """The resolved configuration, whole or not at all."""
    run_dir.mkdir(parents=True, exist_ok=True)
    temporary = run_dir / f".{CONFIG_FILE}.tmp"
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, run_dir / CONFIG_FILE)
