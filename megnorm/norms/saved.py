"""The resolved placement as plain data, folded: what a run's config.yaml says beside the user's words."""

from typing import Any

from pydantic import ValidationError

from megnorm.config.base import ConfigError, Section
from megnorm.config.placement import Block, Norm, Placement, Scale
from megnorm.norms.errors import explain
from megnorm.norms.fold import fold
from megnorm.norms.layers import select_layers


def save_placement(placement: Placement) -> dict[str, Any]:
    """Slots that are not empty, with equal layers under one selector; ``read_placement`` gives them back."""
    model = {
        name: _plain(value) for name, value in placement if name != "blocks" and not _empty(placement, name)
    }
    layers = {
        str(first) if first == last else f"{first}:{last + 1}": _plain(block)
        for first, last, block in fold(placement.blocks)
    }
    return {**model, "layers": layers}


def read_placement(saved: dict[str, Any], layers: int) -> Placement:
    """The placement of ``layers`` blocks that ``save_placement`` wrote. Raises ConfigError for another."""
    blocks: list[Any] = [{}] * layers
    for selector, block in saved.get("layers", {}).items():
        for layer in select_layers(selector, layers):
            blocks[layer] = block
    try:
        return Placement(
            **{name: value for name, value in saved.items() if name != "layers"}, blocks=tuple(blocks)
        )
    except ValidationError as error:
        raise ConfigError(explain(error, "model.norm.resolved", Placement, "slot")) from None


def check_saved(saved: dict[str, Any], placement: Placement) -> None:
    """Raises ConfigError when a saved placement is another one than what the scheme and its options give."""
    now = save_placement(placement)
    old_values, new_values = _flat(saved), _flat(now)
    for path in sorted({*old_values, *new_values}):
        old, new = old_values.get(path, "absent"), new_values.get(path, "absent")
        if old != new:
            raise ConfigError(
                f"model.norm.resolved.{path}={old} is not what model.norm and the depth give, which is "
                f"{new}; to follow the scheme, take resolved out (model.norm.resolved=null)"
            )


def _plain(value: Any) -> Any:
    if isinstance(value, Scale) and value == Scale(value=value.value):
        return value.value
    if not isinstance(value, Section):
        return value
    always = (
        ("kind", "eps")
        if isinstance(value, Norm)
        else ("attention", "ffn")
        if isinstance(value, Block)
        else ()
    )
    return {name: _plain(item) for name, item in value if name in always or not _empty(value, name)}


def _empty(section: Section, name: str) -> bool:
    return getattr(section, name) == type(section).model_fields[name].default


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(values, dict) or not values:
        return {prefix: values}
    return {
        path: value
        for name, item in values.items()
        for path, value in _flat(item, f"{prefix}.{name}" if prefix else str(name)).items()
    }
