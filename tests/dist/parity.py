"""One layout of a tiny model against one process in plain torch, sharing none of the engine's code."""

import hashlib

import numpy as np
import torch
import torch.distributed as dist

from megnorm.config import parse_config

VOCAB, SEQUENCE = 61, 16
# (optimizer, steps, clip): plain SGD shows a wrong scale of a gradient, to which Adam is blind.
PHASES = (("sgd", 1, 0.0), ("adamw", 5, 0.5))


def tiny_config(scheme="hybrid_star", **changes):
    raw = {
        "run_dir": "unused", "seed": 7,
        "model": {"layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn_hidden": 64, "vocab_size": VOCAB,
                  "pad_vocab_to": 64, "norm": scheme, "init": {"std": 0.2}},
        "data": {"sequence_length": SEQUENCE, "train": "unused"},
        "train": {"steps": 5, "micro_batch": 1, "global_batch": 8, "clip": 0.5},
        "optimizer": {"lr": 2e-3, "eps": 1e-4},
        "schedule": {"kind": "constant"},
    }
    for key, value in changes.items():
        *sections, name = key.split("__")
        node = raw
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return parse_config(raw)


def global_batch(step, size):
    """tokens [size, s], targets, weights: masks are uneven, weights sum to 1 over the batch."""
    stream = np.random.Generator(np.random.Philox(key=100 + step))
    ids = torch.from_numpy(stream.integers(0, VOCAB, (size, SEQUENCE + 1)))
    valid = torch.from_numpy(stream.random((size, SEQUENCE)) < np.linspace(0.1, 1.0, size)[:, None])
    valid[0, 0] = True
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), valid.float() / valid.sum()


def perturb(parameters):
    """Gains and biases away from 1 and 0, a function of the name only."""
    with torch.no_grad():
        for parameter in parameters:
            sharding = getattr(parameter, "sharding", None)
            if sharding is not None and sharding.role in ("norm", "bias"):
                key = int.from_bytes(hashlib.blake2b(sharding.name.encode(), digest_size=8).digest(), "little")
                noise = np.random.Generator(np.random.Philox(key=key)).normal(size=sharding.shape).astype(np.float32)
                parameter += 0.3 * torch.from_numpy(noise[sharding.slices()])


def sgd(groups):
    return torch.optim.SGD(groups, lr=1.0)


def one_process(config):
    """The reference: plain torch, whole batch at once; a run for each optimizer of PHASES."""
    return {optimizer: _one_process(config, optimizer, steps, clip) for optimizer, steps, clip in PHASES}


def _one_process(config, optimizer, steps, clip):
    from megnorm.build import build_module
    from megnorm.parallel.groups import make_groups
    from megnorm.plan.layout import Layout

    single = config.model_copy(update={"parallel": config.parallel.model_copy(update={"tp": 1, "pp": 1})})
    module = build_module(single, make_groups(Layout(1, 1, 1), torch.device("cpu")))
    perturb(module.parameters())
    groups = [{"params": [p for p in module.parameters() if (p.sharding.role == "matrix") == decayed],
               "weight_decay": config.optimizer.weight_decay if decayed else 0.0} for decayed in (True, False)]
    optim = (sgd(groups) if optimizer == "sgd" else
             torch.optim.AdamW(groups, lr=config.optimizer.lr, betas=config.optimizer.betas, eps=config.optimizer.eps))
    losses, norms = [], []
    for step in range(steps):
        optim.zero_grad()
        loss = module(*global_batch(step, config.train.global_batch))
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(module.parameters(), clip or 1e9)))
        optim.step()
        losses.append(loss.item())
    with torch.no_grad():
        final = module(*global_batch(99, config.train.global_batch)).item()
    return {"losses": losses, "norms": norms, "eval": final,
            "weights": {p.sharding.name: p.detach().numpy() for p in module.parameters()}}


def in_layout(config):
    """On every rank: the same training in the configured layout. The weights are this rank's parts."""
    return {optimizer: _in_layout(config, optimizer, steps, clip) for optimizer, steps, clip in PHASES}


def _in_layout(config, optimizer, steps, clip):
    from deepspeed.utils import groups as engine_groups
    from deepspeed.utils import safe_get_full_fp32_param

    from megnorm.build import build_engine, build_module
    from megnorm.engine.optimizer import adamw
    from megnorm.engine.start import start
    from megnorm.parallel.groups import make_groups
    from megnorm.plan.layout import make_layout

    device = torch.device("cpu")
    start(device, 60)
    engine_groups.mpu = None  # of the engine of the phase before
    config = config.model_copy(update={"train": config.train.model_copy(update={"clip": clip})})
    groups = make_groups(make_layout(config, dist.get_world_size()), device)
    module = build_module(config, groups)
    perturb(module.parameters())
    engine = build_engine(config, groups, module, sgd if optimizer == "sgd" else adamw(config.optimizer))
    losses, norms = [], []
    for step in range(steps):
        result = engine.step(micro_batches(config, groups, step), 1.0 if optimizer == "sgd" else config.optimizer.lr)
        losses.append(result.loss)
        norms.append(result.grad_norm)
    weights = {}
    for parameter in engine.raw.module.parameters():
        full = safe_get_full_fp32_param(parameter)
        if not hasattr(parameter, "megnorm_anchor"):
            part = (parameter if full is None else full).detach().numpy()
            weights[parameter.sharding.name] = (parameter.sharding, part)
    return {"losses": losses, "norms": norms, "weights": weights,
            "eval": engine.evaluate(micro_batches(config, groups, 99))}


def micro_batches(config, groups, step):
    dp, size = groups.layout.dp, config.train.micro_batch
    tokens, targets, weights = global_batch(step, config.train.global_batch)
    count = config.train.global_batch // size
    weights = weights * count
    return [tuple(t[i * size:(i + 1) * size] for t in (tokens, targets, weights))
            for i in range(groups.at.dp, count, dp)]


def gathered(ranks):
    """Whole weights from the ranks' parts, each element written once; replicas must be bit-equal."""
    whole = {}
    for rank in ranks:
        for name, (sharding, part) in rank["weights"].items():
            target = whole.setdefault(name, np.full(sharding.shape, np.nan, np.float32))
            seen = target[sharding.slices()]
            assert np.isnan(seen).all() or (seen == part).all(), f"replicas of {name} differ"
            target[sharding.slices()] = part
    return whole
