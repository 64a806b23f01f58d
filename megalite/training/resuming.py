"""What a run may continue: a checkpoint of the same model, data and horizon."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megalite.config.load import from_dict, to_dict
from megalite.config.schema import Config, ConfigError


def check_resume(config: Config, fingerprint: str, state: dict[str, Any], directory: Path) -> None:
    """Refuse to resume with another model, other data or another horizon, unless `checkpoint.allow` lists the change."""
    saved = from_dict(state["config"])
    allow = config.checkpoint.allow
    shape, saved_shape = (
        {name: value for name, value in to_dict(each)["model"].items() if name not in ("preset", "from_hf", "init_from")}
        for each in (config, saved)
    )
    changed = [f"model.{name} was {saved_shape.get(name)}, is {shape[name]}" for name in shape if saved_shape.get(name) != shape[name]]
    if changed:
        raise ConfigError(f"checkpoint.load = {directory} was made by another model: {'; '.join(changed)}. Give the run another run.name.")
    if state["fingerprint"] != fingerprint and "data" not in allow:
        raise ConfigError(f"checkpoint.load = {directory} was made with other data. Accept it with checkpoint.allow = [data].")
    if saved.train.steps != config.train.steps and "horizon" not in allow and config.optimizer.decay != "constant":
        raise ConfigError(
            f"train.steps = {config.train.steps}, but {directory} was made for {saved.train.steps}: the learning rate would change. "
            "Accept it with checkpoint.allow = [horizon]."
        )
