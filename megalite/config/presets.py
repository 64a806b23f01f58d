"""Named model shapes, stored in presets.yaml."""

from pathlib import Path
from typing import Any

from megalite.config.rule import nearest_name
from megalite.config.schema import ConfigError


def preset(name: str) -> dict[str, Any]:
    """The ModelConfig fields of a named shape. Raises ConfigError naming the nearest preset."""
    import yaml

    presets: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("presets.yaml").read_text())
    if name not in presets:
        legal = f"Legal values: {', '.join(presets)}. Nearest: {nearest_name(name, list(presets))}."
        raise ConfigError(f"model.preset = {name} is not a known shape. {legal}")
    return presets[name]
