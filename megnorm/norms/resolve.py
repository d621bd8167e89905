"""From what the user says about norms to the block of every layer, by its global number."""

from typing import Any

from pydantic import ValidationError

from megnorm.config.base import ConfigError, Section
from megnorm.config.model import InitPolicy, ModelConfig, NormConfig
from megnorm.config.placement import AttentionSlots, Block, FFNSlots, HeadNorm, Norm, Placement
from megnorm.norms.errors import explain, nearest
from megnorm.norms.layers import select_layers
from megnorm.norms.saved import check_saved, save_placement
from megnorm.norms.scheme import Place, Spec
from megnorm.norms.schemes import find_spec

CHOICES = ("kind", "eps", "bias", "gain", "zero_centred", "alpha_init", "rounding")
HEAD_SLOTS = ("q_norm", "k_norm", "v_norm", "ctx_norm")
MODEL_SLOTS = (
    "embed_scale",
    "embed_norm",
    "final_norm",
    "streams",
    "attention_scale",
    "attention_softcap",
    "final_softcap",
)


def placement_of(model: ModelConfig) -> Placement:
    """The norms of a model. Raises ConfigError for an unknown scheme, option, slot or layer."""
    placement = resolve(model.norm, model.layers, model.hidden)
    after = [layer for layer, block in enumerate(placement.blocks) if block.attention.head_scale == "after"]
    if after and model.hidden % model.heads:
        raise ConfigError(f"model.norm: head_scale=after in layer {after[0]} cuts the {model.hidden} channels into one "
                          f"chunk for each of {model.heads} heads, which does not come out even; take before")
    return placement


def with_placement(model: ModelConfig) -> ModelConfig:
    """The model with its resolved placement written down in ``norm.resolved``."""
    norm = model.norm.model_copy(update={"resolved": save_placement(placement_of(model))})
    return model.model_copy(update={"norm": norm})


def init_policy(model: ModelConfig) -> InitPolicy:
    """How the matrices of a model start: as the user says, else as the norm scheme's paper does."""
    return model.init.policy or find_spec(model.norm.scheme, model.norm.options).init


def resolve(norm: NormConfig, layers: int, hidden: int | None = None) -> Placement:
    """The norms of ``layers`` blocks of width ``hidden``, which only factors of the embedding need.

    Raises ConfigError for an unknown scheme, option, slot or layer.
    """
    spec = find_spec(norm.scheme, norm.options)
    n, h = default_norms(norm, spec)
    places = [Place(n, h, number, layers, hidden) for number in range(1, layers + 1)]
    blocks = [spec.block(place) for place in places]
    for selector, changes in norm.overrides.items():
        for layer in select_layers(selector, layers):
            blocks[layer] = _override(blocks[layer], changes, (n, h), f"model.norm.overrides[{selector!r}]")
    ends = {**spec.ends(places[0]), **_model_slots(norm, (n, h))}
    placement = _checked(Placement, {**ends, "blocks": tuple(blocks)}, "model.norm")
    if norm.resolved is not None:
        check_saved(norm.resolved, placement)
    return placement


def default_norms(norm: NormConfig, spec: Spec) -> tuple[Norm, HeadNorm]:
    """The norm over the hidden width and the one over heads: the user's choices, then the scheme's."""
    chosen = {name: getattr(norm, name) for name in CHOICES if getattr(norm, name) is not None}

    def merged(prescribed: dict[str, Any]) -> dict[str, Any]:
        foreign = norm.kind not in (None, prescribed.get("kind", "rms"))
        return {**({} if foreign else prescribed), **chosen}

    return Norm(**merged(spec.norm)), HeadNorm(
        **merged({**spec.norm, **spec.head} if spec.head else spec.norm)
    )


def _model_slots(norm: NormConfig, defaults: tuple[Norm, HeadNorm]) -> dict[str, Any]:
    given = {name: getattr(norm, name) for name in MODEL_SLOTS}
    return {
        name: _slot_value(name, value, defaults, f"model.norm.{name}")
        for name, value in given.items()
        if value != "scheme"
    }


def _override(
    block: Block, changes: dict[str, dict[str, Any]], defaults: tuple[Norm, HeadNorm], where: str
) -> Block:
    """The block with some slots replaced; "default" is the configured norm, "none" an absent slot."""
    parts = {}
    for part, slots in changes.items():
        kind = {"attention": AttentionSlots, "ffn": FFNSlots}[part]
        values = {name: getattr(getattr(block, part), name) for name in kind.model_fields}
        for name, value in slots.items():
            if name not in values:
                raise ConfigError(f"{where}.{part}.{name}: unknown slot; {nearest(name, list(values))}")
            values[name] = _slot_value(name, value, defaults, f"{where}.{part}.{name}")
        parts[part] = _checked(kind, values, f"{where}.{part}")
    return block.model_copy(update=parts)


def _slot_value(name: str, value: Any, defaults: tuple[Norm, HeadNorm], where: str) -> Any:
    """A norm's slot as a norm; the value of another slot, "none" for nothing, is left to its type."""
    if not name.endswith("_norm"):
        return (
            None
            if value == "none" and name in ("attention_scale", "attention_softcap", "final_softcap")
            else value
        )
    default = defaults[name in HEAD_SLOTS]
    if value in (None, "none"):
        return None
    if value == "default":
        return default
    if not isinstance(value, dict):
        raise ConfigError(f"{where}={value!r}: write default, none, or a mapping such as {{kind: layer}}")
    return _checked(type(default), {**dict(default), **value}, where, "key of a norm")


def _checked(section: type[Section], values: dict[str, Any], where: str, noun: str = "key") -> Any:
    try:
        return section(**values)
    except ValidationError as error:
        raise ConfigError(explain(error, where, section, noun)) from None
