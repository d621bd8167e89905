"""The registry of norm schemes, and the ones that are built on others."""

import difflib
from typing import Any

from pydantic import Field, ValidationError

from megnorm.config.base import ConfigError, Section
from megnorm.config.placement import Block
from megnorm.norms.classic import CLASSIC
from megnorm.norms.errors import explain
from megnorm.norms.families import FAMILIES
from megnorm.norms.hybrid import HYBRID
from megnorm.norms.scales import SCALES
from megnorm.norms.scheme import Place, Scheme, Spec, change_sublayers, fixed, no_final_norm


class ProResOptions(Section):
    """base, base_options: the scheme whose branches grow. steps: T, in which those of the first block do."""

    base: str = "pre"
    base_options: dict[str, Any] = {}
    steps: int = Field(1000, gt=0)


def prores(options: ProResOptions) -> Spec:
    """Any scheme with each branch times min(t / (T l), 1) in training step t."""
    at = "model.norm.options.base"
    base = find_spec(options.base, options.base_options, at, f"{at}_options")

    def block(at: Place) -> Block:
        return change_sublayers(
            base.block(at),
            lambda slots: {
                "branch_scale": slots.branch_scale.model_copy(update={"ramp_steps": options.steps * at.l})
            },
        )

    return base._replace(block=block)


SCHEMES: dict[str, Scheme] = {
    **CLASSIC,
    **HYBRID,
    **SCALES,
    "prores": Scheme(
        "any base with its branches warmed up, layer after layer: times min(t / (T l), 1)",
        "arXiv:2603.05369",
        prores,
        ProResOptions,
    ),
    **FAMILIES,
    "custom": Scheme(
        "no norm anywhere: spell the slots out in overrides",
        "-",
        fixed(lambda at: Block(), ends=no_final_norm),
    ),
}
ALIASES = {alias: name for name, scheme in SCHEMES.items() for alias in scheme.aliases}


def find_scheme(name: str, where: str = "model.norm") -> Scheme:
    """The scheme of that name or alias. Raises ConfigError that names the nearest one."""
    if name in SCHEMES or name in ALIASES:
        return SCHEMES[ALIASES.get(name, name)]
    near = difflib.get_close_matches(name, [*SCHEMES, *ALIASES], n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(SCHEMES)}"
    raise ConfigError(f"{where}: unknown scheme {name!r}; {hint}")


def find_spec(
    name: str, options: dict[str, Any], where: str = "model.norm", options_at: str = "model.norm.options"
) -> Spec:
    """The scheme with its options checked. Raises ConfigError for an unknown scheme or option."""
    scheme = find_scheme(name, where)
    try:
        return scheme.spec(scheme.options(**options))
    except ValidationError as error:
        raise ConfigError(explain(error, options_at, scheme.options, f"option of {name}")) from None
