"""What the user may say: typed sections, YAML with key=value overrides, cross-field checks. No torch."""

from megnorm.config.base import ConfigError
from megnorm.config.config import Config, dump_config, load_config, parse_config, parse_norm
from megnorm.config.model import InitConfig, ModelConfig, NormConfig

__all__ = ["Config", "ConfigError", "InitConfig", "ModelConfig", "NormConfig", "dump_config", "load_config",
           "parse_config", "parse_norm"]
