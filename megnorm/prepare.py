"""Everything about a run that can be refused, checked before any worker starts. Imports no torch."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from megnorm.checkpoint.resume import CheckpointError, choose, compare_configs
from megnorm.checkpoint.storage import read_manifest
from megnorm.config import Config, ConfigError, load_config
from megnorm.data.datasets import Datasets, open_datasets, tokenizer_meta
from megnorm.norms import with_placement
from megnorm.norms.backends import check_backend
from megnorm.plan.layout import Layout, check_layout, make_layout
from megnorm.plan.schedule import check_schedule

CONFIG_FILE = "config.yaml"


@dataclass(frozen=True)
class Prepared:
    """A run that can start: complete configuration, layout, open datasets, what changed since the last save."""

    config: Config
    layout: Layout
    datasets: Datasets
    changes: list[str]


def prepare(path: str, overrides: list[str], world: int, resume: str) -> Prepared:
    """Check a run of ``world`` processes. Raises a ValueError of megnorm with one message."""
    config = with_vocabulary(load_config(path, overrides))
    config = config.model_copy(update={"model": with_placement(config.model)})
    layout = make_layout(config, world)
    check_layout(config, layout)
    check_schedule(config)
    check_backend(config.model.norm.backend)
    datasets = open_datasets(config)
    if config.train.eval_every and datasets.valid is None:
        raise ConfigError(f"train.eval_every={config.train.eval_every} needs validation data: name data.valid, "
                          "give data.split a second fraction, or set eval_every to 0")
    return Prepared(config, layout, datasets, check_run_dir(config, resume))


def with_vocabulary(config: Config) -> Config:
    """The configuration with model.vocab_size filled in from the data's tokenizer."""
    if config.model.vocab_size is not None:
        return config
    meta = tokenizer_meta(config)
    if meta is None:
        raise ConfigError("model.vocab_size is missing, and the training data has no sidecar "
                          f"{(config.data.train or config.data.sources)[0][1]}.meta.json that says it")
    model = config.model.model_copy(update={"vocab_size": meta.tokenizer.vocab_size})
    return config.model_copy(update={"model": model})


def make_run_dir(config: Config) -> None:
    """Create the run directory, and see that files can be written in it. Raises ConfigError."""
    try:
        Path(config.run_dir).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=config.run_dir):
            pass
    except OSError as error:
        raise ConfigError(f"run_dir={config.run_dir} can't be written ({error.strerror}): "
                          "name another folder") from None


def check_run_dir(config: Config, resume: str) -> list[str]:
    """Changes against what the run directory (or the checkpoint to resume) was written with.

    Raises CheckpointError when they can't be resumed.
    """
    run_dir = Path(config.run_dir)
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError(f"run_dir={config.run_dir} is a file; name a folder")
    choice = choose(run_dir, resume, checksums=False)
    if choice.path is not None:
        manifest = read_manifest(choice.path)
        saved, origin, samples = manifest.config, choice.path, manifest.trainer["samples"]
    elif (run_dir / CONFIG_FILE).exists():
        saved, origin, samples = load_config(run_dir / CONFIG_FILE).model_dump(mode="json"), run_dir / CONFIG_FILE, 0
    else:
        return []
    saved, new = {**saved, "run_dir": None}, {**config.model_dump(mode="json"), "run_dir": None}
    changes, fatal = compare_configs(_in_words(saved), _in_words(new), samples)
    if not fatal and saved["model"]["norm"].get("resolved"):  # the same words may have come to mean other slots
        changes, fatal = compare_configs(saved, new, samples)
    if fatal:
        raise CheckpointError(f"{origin} is of another run, which this one can't continue:\n  " + "\n  ".join(fatal)
                              + "\ntake another run_dir, or the configuration that it was started with")
    return changes


def _in_words(config: dict) -> dict:
    """The configuration without the resolved placement of the norms, which follows from the rest."""
    return {**config, "model": {**config["model"], "norm": {**config["model"]["norm"], "resolved": None}}}
