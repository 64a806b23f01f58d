"""What a run is: typed sections, their YAML and command line, and the rules between them. Imports no torch."""

from megalite.config.families import from_hf_config, to_hf_config
from megalite.config.load import exit_with, from_dict, load_config, to_dict, to_yaml
from megalite.config.presets import PRESETS, preset
from megalite.config.rules import check
from megalite.config.rules.training import duration_seconds
from megalite.config.schema import Config, ConfigError, ModelConfig

__all__ = [
    "PRESETS",
    "Config",
    "ConfigError",
    "ModelConfig",
    "check",
    "duration_seconds",
    "exit_with",
    "from_dict",
    "from_hf_config",
    "load_config",
    "preset",
    "to_dict",
    "to_hf_config",
    "to_yaml",
]
