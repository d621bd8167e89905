"""What the user may say: typed sections, YAML with key=value overrides, cross-field checks. No torch."""

from megnorm.config.base import ConfigError
from megnorm.config.config import Config, dump_config, load_config, parse_config, parse_norm
from megnorm.config.model import InitConfig, ModelConfig, NormConfig
from megnorm.config.moe import Moe

__all__ = ["Config", "ConfigError", "InitConfig", "ModelConfig", "Moe", "NormConfig", "dump_config", "load_config",
           "parse_config", "parse_norm"]
