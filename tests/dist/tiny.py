"""The tiny model of the layout tests."""

from megnorm.config import Config, parse_config


def tiny_config(scheme="hybrid_star", **changes) -> Config:
    """4 layers, hidden 32; changes as section__key=value."""
    raw = {
        "run_dir": "unused", "seed": 7,
        "model": {"layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn_hidden": 64, "vocab_size": 61,
                  "pad_vocab_to": 64, "norm": scheme},
        "data": {"sequence_length": 16, "train": "unused"},
        "train": {"steps": 5, "micro_batch": 2, "global_batch": 8},
        "optimizer": {"lr": 2e-3},
        "schedule": {"kind": "constant"},
    }
    for key, value in changes.items():
        *sections, name = key.split("__")
        node = raw
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return parse_config(raw)
