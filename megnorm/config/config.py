"""The whole configuration, its cross-field checks, and reading it from YAML with key=value overrides."""

import difflib
import re
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError, model_validator

from megnorm.config.base import ConfigError, Section
from megnorm.config.model import ModelConfig, NormConfig
from megnorm.config.run import (
    CheckpointConfig,
    DataConfig,
    ObserveConfig,
    OptimizerConfig,
    ParallelConfig,
    ScheduleConfig,
    TrainConfig,
)


class Config(Section):
    """One run."""

    run_dir: str
    seed: int = 1234
    model: ModelConfig
    data: DataConfig
    parallel: ParallelConfig = ParallelConfig()
    train: TrainConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = ScheduleConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    observe: ObserveConfig = ObserveConfig()

    @model_validator(mode="after")
    def _documents_stay_apart(self) -> "Config":
        moe = self.model.moe
        if self.data.mask_documents and moe is not None and moe.capacity is not None:
            raise ValueError(f"data.mask_documents=true doesn't go with model.moe.capacity={moe.capacity:g}: the earlier "
                             "documents of a row would take places of the later ones; set capacity to none")
        if self.data.reset_positions and self.model.positions == "none":
            raise ValueError("data.reset_positions=true has nothing to reset with model.positions=none: leave one of "
                             "them out")
        return self

    @property
    def tokens_per_step(self) -> int:
        """Target tokens of one global batch."""
        return self.train.global_batch * self.data.sequence_length

    @property
    def total_steps(self) -> int:
        """Steps of the whole run; a duration in tokens is rounded up to whole steps."""
        if self.train.steps is not None:
            return self.train.steps
        return -(-self.train.tokens // self.tokens_per_step)


INTEGER = re.compile(r"^[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+)$")
FLOAT = re.compile(r"^[-+]?(?:(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?"
                   r"|[0-9][0-9_]*[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))$|^\.(?:nan|NaN|NAN)$")
TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """YAML that refuses a key given twice, reads 3e-4 as a number, 2e9 as a whole one (tokens), and
    4:8 (YAML 1.1: base 60), 010 (base 8) and 2024-01-01 as text."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(f"line {key_node.start_mark.line + 1}: a key must be a word or a number")
            if key_node.tag == TAG + "merge":
                continue
            key = self.construct_object(key_node, deep=deep)
            if key in seen:
                raise ConfigError(f"line {key_node.start_mark.line + 1}: the key {key!r} stands twice")
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_number(self, node):
        value = self.construct_yaml_float(node)
        return int(value) if "e" in node.value.lower() and value.is_integer() else value


class _Dumper(yaml.SafeDumper):
    """Quotes what either YAML 1.1 or _Loader would not read back as text."""


_Loader.add_constructor(TAG + "float", _Loader.construct_number)
_replaced = {TAG + name for name in ("int", "float", "timestamp")}
_Loader.yaml_implicit_resolvers = {first: [r for r in resolvers if r[0] not in _replaced]
                                   for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver(TAG + "int", INTEGER, list("-+0123456789"))
_Loader.add_implicit_resolver(TAG + "float", FLOAT, list("-+.0123456789"))
_Dumper.add_implicit_resolver(TAG + "float", FLOAT, list("-+.0123456789"))


def read_yaml(text: str, origin: str) -> Any:
    """Parse YAML text; ``origin`` names it in errors."""
    try:
        return yaml.load(text, Loader=_Loader)
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}:" if mark else ""
        raise ConfigError(f"{origin}:{where} not valid YAML: {getattr(error, 'problem', error)}") from None


def load_config(path: str | Path, overrides: list[str] = ()) -> Config:
    """Read a configuration file, apply ``key.sub=value`` overrides, check everything.

    Raises ConfigError with one message: which value, which rule, the nearest right name.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")], n=1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise ConfigError(f"no configuration file {path}{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    raw = read_yaml(text, str(path))
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: a configuration is a mapping of sections, not {type(raw).__name__}")
    for override in overrides:
        apply_override(raw, override)
    return parse_config(raw, str(path))


def apply_override(raw: dict, override: str) -> None:
    """Set one value: ``train.steps=100``, ``model.norm=pre``; the value is YAML."""
    key, sign, value = override.partition("=")
    if not sign or not key:
        raise ConfigError(f"override {override!r} is not of the form key.sub=value")
    *sections, name = key.split(".")
    node = raw
    for section in sections:
        section = _spelled(section, node)
        child = node.setdefault(section, {})
        if section == "norm" and isinstance(child, str):
            child = node[section] = {"scheme": child}
        if not isinstance(child, dict):
            raise ConfigError(f"override {override!r}: {section!r} is the value {child!r}, not a section")
        node = child
    node[_spelled(name, node)] = read_yaml(value, f"override {override!r}")
    if sections[:1] == ["model"] and isinstance(norm := raw["model"].get("norm"), dict) and name != "resolved":
        norm.pop("resolved", None)  # written by a run for its own sizes and scheme


def _spelled(name: str, node: dict) -> Any:
    """The key of ``node`` that reads ``name``: a layer 0 in YAML is a number, in an override it is text."""
    return next((key for key in node if str(key) == name), name)


def parse_config(raw: dict, origin: str = "config") -> Config:
    """A mapping as a checked Config; every error in one ConfigError, a line each."""
    try:
        return Config.model_validate(raw, strict=None)
    except ValidationError as error:
        lines = [_explain(item, raw) for item in error.errors()]
        raise ConfigError(f"{origin}: " + ("\n  ".join([""] + lines) if len(lines) > 1 else lines[0])) from None


def parse_norm(scheme: str, changes: list[str]) -> NormConfig:
    """A scheme with ``key=value`` changes: keys of model.norm as in a configuration, others are its options."""
    raw: dict = {"model": {"norm": {"scheme": scheme}}}
    for change in changes:
        key = change.partition("=")[0].partition(".")[0]
        apply_override(raw, f"model.norm.{'' if key in NormConfig.model_fields else 'options.'}{change}")
    try:
        return NormConfig.model_validate(raw["model"]["norm"])
    except ValidationError as error:
        item = error.errors()[0]
        raise ConfigError(_explain({**item, "loc": ("model", "norm", *item["loc"])}, raw)) from None


def dump_config(config: Config) -> str:
    """YAML that load_config reads back to an equal Config."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False)


def _explain(item: dict, raw: dict) -> str:
    where = ".".join(str(part) for part in item["loc"] if not str(part).startswith("function-"))
    if item["type"] == "extra_forbidden":
        names = _siblings(item["loc"])
        near = difflib.get_close_matches(str(item["loc"][-1]), names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(names)}"
        return f"unknown key {where!r}; {hint}"
    if item["type"] == "missing":
        return f"{where!r} is missing"
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "value_error":
        return f"{where}: {message}" if where else message
    return f"{where}={item['input']!r}: {message[0].lower()}{message[1:]}"


def _siblings(loc: tuple) -> list[str]:
    section: type[Section] = Config
    for part in loc[:-1]:
        field = section.model_fields.get(part)
        kinds = [] if field is None else [field.annotation, *get_args(field.annotation)]
        sections = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]
        if not sections:
            return []
        section = sections[0]
    return list(section.model_fields)
