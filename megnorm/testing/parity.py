"""The measure of "the layout never changes the result": a layout of ranks against one process in plain torch.

The reference shares the model's modules with the run, but neither the engine, nor the optimizer groups, nor
any collective: one micro batch after the other, ``loss.backward()``, torch's clipping, torch's optimizer.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megnorm.config import Config
from megnorm.config.run import ParallelConfig
from megnorm.parallel.groups import Groups, make_groups
from megnorm.parallel.sharding import Sharding, kept_states
from megnorm.plan.layout import Layout, make_layout

TOLERANCE = 1e-5
# How far a measure may be off when rounding alone moves it that far: see ``reference``.
SPREAD_ALLOWED, SPREAD_AT_MOST = 10.0, 1e-3


@dataclass(frozen=True)
class Phase:
    """A short training from the same start. SGD shows a wrong scale of a gradient, to which Adam is blind;
    after one step with a large power of two as its rate, the change of the weights is the gradient (and the loss of
    such weights says nothing: it is not ``evaluated``)."""

    name: str
    optimizer: str
    lr: float
    steps: int
    clip: float
    evaluated: bool = True


PHASES = (Phase("gradient", "sgd", 2.0**13, 1, 0.0, evaluated=False),
          Phase("sgd", "sgd", 1.0, 3, 0.0),
          Phase("adamw", "adamw", 2e-3, 5, 0.5))


def global_batch(config: Config, step: int) -> tuple[Any, Tensor, Tensor]:
    """Inputs (see ``Engine``), targets [n, s] and weights [n, s] that sum to 1; the masks are very uneven over samples."""
    size, length = config.train.global_batch, config.data.sequence_length
    stream = np.random.Generator(np.random.Philox(key=100 + step))
    ids = torch.from_numpy(stream.integers(0, config.model.vocab_size, (size, length + 1)))
    valid = torch.from_numpy(stream.random((size, length)) < np.linspace(0.1, 1.0, size)[:, None])
    valid[0, 0] = True
    inputs = ids[:, :-1].contiguous()
    if config.data.mask_documents or config.data.reset_positions:
        inputs = inputs, *_documents(config, stream)
    return inputs, ids[:, 1:].contiguous(), valid.float() / valid.sum()


def _documents(config: Config, stream: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Positions and documents [n, s] as the configuration wants them, about four documents in a row."""
    size, length = config.train.global_batch, config.data.sequence_length
    places = np.tile(np.arange(length), (size, 1))
    is_first = stream.random((size, length)) < 4 / length
    begins = np.maximum.accumulate(is_first * places, 1) * config.data.reset_positions
    documents = is_first.cumsum(1) * config.data.mask_documents
    return torch.from_numpy(places - begins), torch.from_numpy(documents.astype(np.int32))


def micro_batches(config: Config, groups: Groups, step: int) -> list[tuple[Any, Tensor, Tensor]]:
    """This rank's share of the global batch; replicas see other samples, context ranks other tokens of them."""
    size, parts = config.train.micro_batch, groups.cp.size
    count = config.train.global_batch // size
    inputs, targets, weights = global_batch(config, step)
    tokens, *rows = inputs if isinstance(inputs, tuple) else (inputs,)
    cut = [t.chunk(parts, 1)[groups.cp.rank] for t in (targets, weights * count * parts, tokens, *rows[:1])]
    batches = [[t[i * size:(i + 1) * size].to(groups.device) for t in (*cut, *rows[1:])]  # documents stay whole
               for i in range(groups.replica, count, groups.layout.replicas)]
    return [((tokens, *rows) if rows else tokens, targets, weights) for targets, weights, tokens, *rows in batches]


def perturb(parameters) -> None:
    """Move gains and biases away from 1 and 0, by their names: at 1 and 0 half of all faults stay hidden."""
    with torch.no_grad():
        for parameter in parameters:
            sharding = parameter.sharding
            if sharding.role in ("norm", "bias"):
                key = int.from_bytes(hashlib.blake2b(sharding.name.encode(), digest_size=8).digest(), "little")
                noise = np.random.Generator(np.random.Philox(key=key)).normal(size=sharding.shape)
                parameter += 0.3 * torch.from_numpy(noise[sharding.slices()]).to(parameter)


def reference(config: Config) -> dict[str, dict[str, Any]]:
    """The results of one process, by phase: losses, norms, eval, start and weights by name, and ``tolerance``.

    The tolerance is 1e-5, unless the training itself is more sensitive: a twin whose start differs by one fp32
    rounding (2^-23, random signs) shows how far one rounding moves the results, and 10 times that is allowed
    (at most 1e-3). Every sum over ranks rounds otherwise than one process, so no layout can do better.
    """
    results = {}
    for phase in PHASES:
        results[phase.name] = _reference(config, phase, 0.0)
        twin = _reference(config, phase, 2.0**-23)
        spread = max(_spread(results[phase.name], twin, key) for key in ("losses", "norms", "eval", "weights"))
        results[phase.name]["tolerance"] = max(TOLERANCE, min(SPREAD_ALLOWED * spread, SPREAD_AT_MOST))
    return results


def _spread(result: dict[str, Any], twin: dict[str, Any], key: str) -> float:
    """Largest relative difference of two runs."""
    if key != "weights":
        own, other = (np.asarray(run[key], float) for run in (result, twin))
        return float(np.max(np.abs(own - other) / np.maximum(np.abs(own), 1e-30), initial=0.0))
    return max(float(np.linalg.norm(own - twin[key][name]) / max(np.linalg.norm(own), 1e-30))
               for name, own in result[key].items())


def in_layout(config: Config, backend_device: str = "cpu",
              phases: Sequence[Phase] = PHASES) -> dict[str, dict[str, Any]]:
    """On every rank: the same in the layout of ``config``; start and weights hold (sharding, this rank's part)."""
    return {phase.name: _in_layout(config, phase, backend_device) for phase in phases}


def _optimizer(phase: Phase, config: Config):
    about = config.optimizer
    if phase.optimizer == "sgd":
        return lambda groups: torch.optim.SGD(groups, lr=phase.lr)
    return lambda groups: torch.optim.AdamW(groups, lr=phase.lr, betas=about.betas, eps=1e-4)


def _decay(config: Config, phase: Phase) -> Config:
    """Weight decay would hide in the gradient phase what it shows in the others."""
    decay = 0.0 if phase.name == "gradient" else config.optimizer.weight_decay
    return config.model_copy(update={
        "optimizer": config.optimizer.model_copy(update={"weight_decay": decay}),
        "train": config.train.model_copy(update={"clip": phase.clip})})


def _reference(config: Config, phase: Phase, jitter: float) -> dict[str, Any]:
    from megnorm.build import build_module
    from megnorm.engine.optimizer import is_decayed

    config = _decay(config, phase)
    groups = make_groups(Layout(1, 1, 1), torch.device("cpu"))
    module = build_module(config.model_copy(update={"parallel": ParallelConfig()}), groups)
    perturb(module.parameters())
    start = _whole(module)
    signs = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter *= 1 + jitter * torch.randint(-1, 2, parameter.shape, generator=signs)
    decayed_or_not = [{"params": [p for p in module.parameters() if is_decayed(p, config.optimizer) == decayed],
                       "weight_decay": config.optimizer.weight_decay if decayed else 0.0} for decayed in (True, False)]
    optimizer = _optimizer(phase, config)([group for group in decayed_or_not if group["params"]])
    losses, norms, routing = [], [], []
    for step in range(phase.steps):
        optimizer.zero_grad()
        module.clock.step = step + 1
        batches = micro_batches(config, groups, step)
        module.routing.loss_scale = 1 / len(batches)
        for batch in batches:
            loss = module(*batch) / len(batches)
            loss.backward()
            losses.append(loss.item())
        norms.append(float(torch.nn.utils.clip_grad_norm_(module.parameters(), phase.clip or 1e9)))
        optimizer.step()
        routing.append(_numbers(module.routing.end_step(lambda sums: sums, len(batches))))
    losses = np.reshape(losses, (phase.steps, -1)).sum(1).tolist()
    with torch.no_grad():
        evaluations = [module(*global_batch(config, 99)).item()] if phase.evaluated else []
    return {"losses": losses, "norms": norms, "eval": evaluations, "routing": routing, "start": start,
            "weights": _whole(module)}


def _whole(module: torch.nn.Module) -> dict[str, np.ndarray]:
    """Values of a module that is whole, by global name, each expert on its own; kept states too."""
    parts = [part for p in module.parameters() for part in _by_name(p.sharding, p)]
    return {**{name: part for name, (_, part) in parts},
            **{name: value.numpy().copy() for name, value in kept_states(module).items()}}


def _by_name(sharding: Sharding, value: Tensor) -> list[tuple[str, tuple[Sharding, np.ndarray]]]:
    """This rank's part of a tensor, expert by expert."""
    return [(part.name, (part, piece.detach().cpu().numpy().copy()))
            for part, piece in zip(sharding.by_expert(), sharding.cut(value), strict=True)]


def _numbers(routing: dict[int, Any]) -> list[float]:
    """All of a step's numbers about routers, in one list."""
    return [number for layer in sorted(routing) for number in np.hstack(routing[layer]).tolist()]


def _in_layout(config: Config, phase: Phase, device_type: str) -> dict[str, Any]:
    from deepspeed.utils import groups as engine_groups

    from megnorm.build import build_engine, build_module
    from megnorm.engine.start import start as start_engine
    from megnorm.engine.state import MASTER, other_states, read_state

    device = torch.device(device_type, dist.get_rank()) if device_type == "cuda" else torch.device(device_type)
    start_engine(device, 600)
    engine_groups.mpu = None  # of the engine of the phase before
    config = _decay(config, phase)
    groups = make_groups(make_layout(config, dist.get_world_size()), device, config.model.kv_heads)
    module = build_module(config, groups)
    perturb(module.parameters())
    start = dict(part for p in module.parameters() for part in _by_name(p.sharding, p))
    engine = build_engine(config, groups, module, _optimizer(phase, config))
    start |= dict(part for state in other_states(engine.raw, groups) for part in _by_name(*state))
    results = [engine.step(micro_batches(config, groups, step), phase.lr, step + 1) for step in range(phase.steps)]
    evaluations = [engine.evaluate(micro_batches(config, groups, 99))] if phase.evaluated else []
    held = [*((p.sharding, values[MASTER].clone()) for p, values in read_state(engine.raw)),
            *other_states(engine.raw, groups)]
    return {"losses": [r.loss for r in results], "norms": [r.grad_norm for r in results], "eval": evaluations,
            "routing": [_numbers(r.routing) for r in results], "start": start,
            "weights": dict(part for values in held for part in _by_name(*values))}


def gathered(parts: list[dict[str, tuple]]) -> dict[str, np.ndarray]:
    """Whole tensors from the ranks' parts; raises AssertionError when replicas are not bit-equal."""
    whole: dict[str, np.ndarray] = {}
    for rank in parts:
        for name, (sharding, part) in rank.items():
            target = whole.setdefault(name, np.full(sharding.shape, np.nan, np.float32))
            seen = target[sharding.slices()]
            assert np.isnan(seen).all() or np.array_equal(seen, part), f"the replicas of {name} differ"
            target[sharding.slices()] = part
    return whole
