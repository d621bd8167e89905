"""No option of the model is dead: each changes the parameters, their first values, the loss or a gradient of
the built model, or is listed here as one that must not."""

import hashlib
from copy import deepcopy
from functools import cache

import numpy as np
import pytest
import torch
from tiny import tiny_config

from megnorm.build import build_module
from megnorm.config.model import InitConfig, ModelConfig, NormConfig
from megnorm.config.moe import Moe
from megnorm.parallel.groups import make_groups
from megnorm.plan.layout import Layout
from megnorm.testing.parity import global_batch, perturb
from megnorm.testing.ranks import run_ranks

MOE = {"experts": 4, "top_k": 2, "ffn_hidden": 16}
# option: the change, and what else must be said for it to matter
CHANGES = {
    "layers": (3, {}), "hidden": (48, {"heads": 4, "head_size": 8}), "heads": (8, {}), "kv_heads": (4, {}),
    "head_size": (16, {}), "ffn_hidden": (48, {}), "activation": ("gelu", {}), "bias": (True, {}),
    "vocab_size": (60, {"pad_vocab_to": 64}), "pad_vocab_to": (32, {"vocab_size": 30}),
    "tie_embeddings": (False, {}), "positions": ("none", {}), "rope_theta": (100.0, {}), "z_loss": (0.1, {}),
    "norm.scheme": ("peri", {}), "norm.options": ({"fraction": 0.75}, {"norm.scheme": "mix_ln"}),
    "norm.kind": ("layer", {}), "norm.eps": (0.1, {}), "norm.bias": (True, {}), "norm.gain": ("none", {}),
    "norm.zero_centred": (True, {}), "norm.alpha_init": (0.9, {"norm.kind": "dyt"}),
    "norm.rounding": ("cast_then_gain", {}), "norm.embed_scale": (2.0, {}),
    "norm.embed_norm": ("default", {}), "norm.final_norm": ("none", {}),
    "norm.streams": ("residual", {}), "norm.attention_scale": (0.9, {}),
    "norm.attention_softcap": (0.5, {}), "norm.final_softcap": (0.5, {}),
    "norm.overrides": ({"1": {"ffn": {"in_norm": "none"}}}, {}),
    "init.policy": ("normal", {}), "init.std": (0.3, {}), "init.embedding_std": (0.3, {}),
    "init.cut": (1.0, {}),
    "moe": (MOE, {}),
    **{f"moe.{name}": (value, {"moe": MOE}) for name, value in {
        "preset": "mixtral", "experts": 8, "top_k": 1, "ffn_hidden": 8, "shared_experts": 1, "router": "sigmoid",
        "normalise_top_k": True, "routed_scale": 2.0, "balance": "sequence", "aux_weight": 0.5, "z_weight": 0.5,
        "capacity": 0.5, "layers": "every 2", "groups": 2}.items()},
    "moe.top_groups": (2, {"moe": {**MOE, "groups": 2}}),
}
# other code for the same values, a record, whole sections, what acts between steps
NO_EFFECT = {"norm.backend", "norm.resolved", "norm", "init", "moe.bias_rate"}


def options(section, prefix=""):
    return {prefix + name for name in section.model_fields}


def test_every_option_is_looked_at():
    known = (options(ModelConfig) | options(NormConfig, "norm.") | options(InitConfig, "init.")
             | options(Moe, "moe."))
    assert set(CHANGES) | NO_EFFECT == known


def config_with(values):
    norm = {name.removeprefix("norm."): value for name, value in values.items() if name.startswith("norm.")}
    config = {f"model__{name.replace('.', '__')}": value for name, value in values.items()
              if not name.startswith("norm.")}
    return tiny_config({"scheme": "pre", **norm}, model__layers=config.pop("model__layers", 4), **deepcopy(config))


def fingerprint(config, groups):
    module = build_module(config, groups)
    first = hashlib.sha256()
    for parameter in module.parameters():
        first.update(f"{parameter.sharding.name} {tuple(parameter.shape)}".encode())
        first.update(parameter.detach().numpy().tobytes())
    perturb(module.parameters())
    found = [first.hexdigest()]
    tokens, targets, weights = global_batch(config, 0)
    for dtype in (torch.float32, torch.bfloat16):
        module.to(dtype).zero_grad()
        loss = module(tokens, targets, weights)
        loss.backward()
        gradient = sum(float(p.grad.double().square().sum()) for p in module.parameters())
        found += [float(np.float32(loss.item())), gradient]
    return found


def fingerprints(cases):
    groups = make_groups(Layout(pp=1, dp=1, tp=1), torch.device("cpu"))
    return [[fingerprint(config, groups) for config in pair] for pair in cases]


@cache
def measured():
    pairs = [[config_with(said), config_with({**said, name: value})]
             for name, (value, said) in CHANGES.items()]
    return dict(zip(CHANGES, run_ranks(fingerprints, 1, pairs)[0], strict=True))


@pytest.mark.parametrize("name", CHANGES)
def test_an_option_has_an_effect(name):
    before, after = measured()[name]
    assert before != after


def test_without_a_change_nothing_changes():
    """To the bit; another backend of the norms gives the same within rounding."""
    plain = config_with({})
    ((pair, backends),) = run_ranks(fingerprints, 1, [[plain, plain], [plain, config_with({"norm.backend": "torch"})]])
    assert pair[0] == pair[1]
    assert backends[0][0] == backends[1][0]
    assert backends[0][1:3] == pytest.approx(backends[1][1:3], rel=1e-5)
    assert backends[0][3:] == pytest.approx(backends[1][3:], rel=2e-2)
