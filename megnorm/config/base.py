"""Common behaviour of every configuration section: immutable, typed, no unknown key."""

from pydantic import BaseModel, ConfigDict


class ConfigError(ValueError):
    """A user's mistake in a configuration: one message with the value, the rule and what to do."""


class Section(BaseModel):
    """One section of the configuration. Unknown keys and wrong types are errors, values can't change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
