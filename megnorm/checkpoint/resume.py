"""From which checkpoint a run goes on, and whether its configuration allows that. No torch."""

from pathlib import Path
from typing import Any, NamedTuple

from megnorm.checkpoint import storage
from megnorm.checkpoint.manifest import FILE_NAME, Unreadable

_ABSENT = object()
_SIZES = "the saved weights have another size"
_FUNCTION = "the saved weights belong to another function"
_STREAM = "the samples seen so far would be others"
# What can't change at a resume, by key or by section, and why.
_FATAL = {
    "model.layers": "the saved weights have another depth",
    "model.hidden": _SIZES, "model.heads": _SIZES, "model.kv_heads": _SIZES, "model.head_size": _SIZES,
    "model.ffn_hidden": _SIZES, "model.vocab_size": _SIZES, "model.pad_vocab_to": _SIZES,
    "model.bias": _SIZES, "model.tie_embeddings": _SIZES,
    "model.activation": _FUNCTION, "model.norm": _FUNCTION,
    "model.moe.experts": _SIZES, "model.moe.ffn_hidden": _SIZES, "model.moe.shared_experts": _SIZES,
    "model.moe.layers": _SIZES, "model.moe.top_k": _FUNCTION, "model.moe.router": _FUNCTION,
    "model.moe.normalise_top_k": _FUNCTION, "model.moe.routed_scale": _FUNCTION, "model.moe.capacity": _FUNCTION,
    "data.train": _STREAM, "data.sources": _STREAM, "data.split": _STREAM, "data.sequence_length": _STREAM,
    "data.order": _STREAM, "data.packing": _STREAM, "data.blend": _STREAM,
    "seed": _STREAM,
    "train.global_batch": "the position in the stream of samples is counted in batches of the saved size",
}
_HARMLESS = ("model.norm.backend",)
_DATASETS = ("data.train", "data.sources")


class CheckpointError(ValueError):
    """No way to resume as asked: one message with what was found and what to do."""


class Choice(NamedTuple):
    """The checkpoint to resume from, None to start at step 0; and each folder passed over with the reason."""

    path: Path | None
    skipped: list[tuple[Path, str]]


def choose(run_dir: str | Path, wanted: str, checksums: bool = True) -> Choice:
    """Where a run starts. ``wanted``: auto, none, or the path of a checkpoint or of a run directory.

    auto: the newest complete checkpoint, or step 0 where there is none at all. none: step 0, refused beside
    checkpoints. A path that is a checkpoint is taken or refused, never passed over; a path outside of a
    run_dir that has checkpoints of its own is refused, since the run would overwrite them.
    Reads all files of what it chooses to verify them, unless told otherwise. Raises CheckpointError.
    """
    own = storage.candidates(run_dir)
    if wanted == "none":
        if own:
            raise CheckpointError(f"resume=none would start at step 0 beside the checkpoints of {run_dir} "
                                  f"(up to {own[0].name}): resume with auto, take another run_dir, or move "
                                  "them away")
        return Choice(None, [])
    if wanted == "auto":
        return Choice(None, []) if not own else _newest(run_dir, checksums)
    path = Path(wanted)
    if not path.is_dir():
        raise CheckpointError(f"resume={wanted}: there is no such folder; give auto, none, a checkpoint "
                              "(.../checkpoints/step-00000020) or a run directory")
    if own and Path(run_dir).resolve() not in (path.resolve(), *path.resolve().parents):
        raise CheckpointError(f"resume={wanted} would overwrite the checkpoints that {run_dir} has (up to "
                              f"{own[0].name}): resume with auto, or take another run_dir")
    if (path / FILE_NAME).exists() or path.name.startswith("step-"):
        try:
            storage.verify(path, checksums)
        except Unreadable as reason:
            raise CheckpointError(f"{path} is not a complete checkpoint: {reason}") from None
        return Choice(path, [])
    run = path.parent if path.name == storage.checkpoints_dir(path).name else path
    if not storage.candidates(run):
        raise CheckpointError(f"resume={wanted}: no checkpoint in {storage.checkpoints_dir(run)}")
    return _newest(run, checksums)


def _newest(run_dir: str | Path, checksums: bool) -> Choice:
    found = storage.find_newest(run_dir, checksums)
    if found.path is None:
        reasons = "; ".join(f"{path.name}: {reason}" for path, reason in found.skipped)
        raise CheckpointError(f"none of the checkpoints of {run_dir} is complete ({reasons}): move them away "
                              "to start at step 0")
    return Choice(*found)


def compare_configs(saved: dict[str, Any], new: dict[str, Any], samples: int = 0) -> tuple[list[str], list[str]]:
    """Changed keys as ``key: old -> new``, and those among them that can't be resumed, with the reason.

    saved, new: nested dictionaries of JSON values; samples: how many the run has seen. A dataset that moved to
    another folder is only a change; one with another name or weight is another stream of samples.
    """
    old_values, new_values = _flatten(saved), _flatten(new)
    changes, fatal = [], []
    for key in sorted({*old_values, *new_values}):
        old, now = (values.get(key, _ABSENT) for values in (old_values, new_values))
        if old == now:
            continue
        line = f"{key}: {_show(old)} -> {_show(now)}"
        changes.append(line)
        reason = _reason(key)
        if reason and not (key in _DATASETS and _base_names(old) == _base_names(now)):
            fatal.append(f"{line} ({reason})")
    past = [change["at_sample"] for change in _differing_mixtures(saved, new) if change["at_sample"] < samples]
    if past:
        fatal.append(f"data.changes: a mixture from sample {min(past)} on, of which {samples} are seen ({_STREAM})")
    if new_values.get("data.order") == "megatron":
        fatal += [f"{line} ({_STREAM}: order=megatron depends on the length of the run)" for line in changes
                  if line.startswith(("train.steps:", "train.tokens:", "train.global_batch:"))]
    return changes, fatal


def _differing_mixtures(saved: dict[str, Any], new: dict[str, Any]) -> list[dict[str, Any]]:
    """Changes of the mixture that only one of the two configurations has."""
    old, now = (config.get("data", {}).get("changes") or [] for config in (saved, new))
    return [change for change in [*old, *now] if change not in old or change not in now]


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat |= _flatten(value, f"{prefix}{key}.")
        elif value not in ({}, None):
            flat[prefix + key] = list(value) if isinstance(value, tuple) else value
    return flat


def _show(value: Any) -> str:
    return "(not set)" if value is _ABSENT else str(value)


def _reason(key: str) -> str | None:
    if key in _HARMLESS:
        return None
    return next((why for name, why in _FATAL.items() if key == name or key.startswith(f"{name}.")), None)


def _base_names(sources: Any) -> Any:
    if not isinstance(sources, (list, tuple)):
        return sources
    return [(weight, Path(prefix).name) for weight, prefix in sources]
