"""Named model shapes, stored in presets.yaml."""

import os
from pathlib import Path
from typing import Any

from megalite.config.checkout import CONFIGS
from megalite.config.errors import ConfigError
from megalite.config.repository_id import is_repository_id
from megalite.config.rule import suggestion


def presets() -> dict[str, dict[str, Any]]:
    """Name → ModelConfig fields of every shape."""
    import yaml

    shapes: dict[str, dict[str, Any]] = yaml.safe_load(
        Path(__file__).with_name("presets.yaml").read_text(encoding="utf-8")
    )
    for shape in shapes.values():
        if "layer_blocks" in shape:
            letters = shape["layer_blocks"]
            shape["layer_blocks"] = [letters[letter] for letter in letters["pattern"]]
    return shapes


def preset(name: str) -> dict[str, Any]:
    """The ModelConfig fields of a named shape. Raises ConfigError naming the nearest preset."""
    shapes = presets()
    if name not in shapes:
        if is_repository_id(name) or os.path.isfile(Path(name, "config.json")):
            raise ConfigError(
                f"model.preset = {name} is a Hugging Face model. Set model.from_hf to {name}, and remove the "
                "preset."
            )
        if (CONFIGS / f"{name}.yaml").is_file():
            raise ConfigError(
                f"model.preset = {name} is a configuration, not a shape. Pass it as --config {name}, and "
                "remove the preset."
            )
        legal = f"Legal values: {', '.join(shapes)}.{suggestion(name, shapes)}"
        raise ConfigError(f"model.preset = {name} is not a known preset. {legal}")
    return shapes[name]
