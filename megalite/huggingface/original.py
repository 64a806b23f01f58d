"""What a checkpoint has kept of its model's origin: configuration, family, and the names of modules in it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from megalite.checkpoint import CheckpointError, Manifest, find
from megalite.config.load import from_dict
from megalite.config.sections.model import ModelConfig
from megalite.families.model_config import families, hf_config
from megalite.families.module_names import names_of
from megalite.huggingface.companions import COMPANIONS
from megalite.huggingface.config_json import misfit, to_hf_config
from megalite.huggingface.source import HF
from megalite.huggingface.tensor_places import TensorPlace, places


def model_of(manifest: Manifest) -> ModelConfig:
    """Return the model of a checkpoint. Raises CheckpointError if it has no configuration."""
    if "config" not in manifest.state:
        raise CheckpointError(
            f"{manifest.directory} does not contain a configuration. Use a checkpoint written by `megalite "
            "train` or `megalite convert`."
        )
    return from_dict(manifest.state["config"]).model


def origin(directory: Path, model: ModelConfig) -> Path | None:
    """Return the directory of a model's config.json and tokenizer, or None.

    This is a directory in the checkpoint or in the one that it started from, or the Hugging Face directory.
    """
    start = model.initial_weights or ""
    started = (
        Path(start.removeprefix(HF)) if start.startswith(HF) else find(Path(start or directory)) / COMPANIONS
    )
    places_to_look = [directory / COMPANIONS, started, *([Path(model.from_hf)] if model.from_hf else [])]
    return next((place for place in places_to_look if (place / "config.json").is_file()), None)


def family_like(model: ModelConfig, base: dict[str, Any]) -> str | None:
    """Return the family of the original model if it still supports this one, otherwise None."""
    name = base.get("model_type")
    rows = families().rows
    return name if name in rows and misfit(model, rows[name]) is None else None


def places_of(model: ModelConfig, directory: Path) -> dict[str, TensorPlace]:
    """Return the places of a model's tensors in the modules of its family, whose names PEFT has."""
    family = family_of(model, directory)
    by_name = places(model, family)
    for theirs, module in names_of(model, family).memory:
        by_name = {
            name: replace(place, theirs=place.theirs.replace(theirs, module))
            for name, place in by_name.items()
        }
    return by_name


def head_of(model: ModelConfig, directory: Path) -> str:
    """Return the name of the head's module in that family."""
    return head_in(model, family_of(model, directory))


def head_in(model: ModelConfig, family: str) -> str:
    """Return the name of the head's module in a family."""
    return next(theirs for theirs, ours in names_of(model, family).ends.items() if ours in ("head", "score"))


def family_of(model: ModelConfig, directory: Path) -> str:
    """Return the original family of a model, or the first one that supports it.

    Args:
        directory: directory of the checkpoint.
    """
    like = origin(directory, model)
    return str(to_hf_config(model, family_like(model, hf_config(like) if like else {}))["model_type"])
