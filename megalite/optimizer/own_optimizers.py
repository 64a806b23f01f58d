"""Optimizers of the user: FILE:CLASS, or a class that a file in `run.extensions` registers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megalite.config.errors import ConfigError
from megalite.config.extensions import EXTENSIONS, import_file
from megalite.optimizer.registry import OptimizerEntry
from megalite.optimizer.update_rule import UpdateRule
from megalite.parallel.spec import EMA, WEIGHT


def own_entry(name: str) -> OptimizerEntry:
    """Return the optimizer of the user that `optimizer.name` names.

    Raises:
        ConfigError: there is no such class, or it is no `UpdateRule`.
    """
    option = f"optimizer.name = {name}"
    if (rule := EXTENSIONS.optimizers.get(name)) is None:
        file, _, own = name.rpartition(":")
        if (rule := getattr(import_file(Path(file).expanduser(), option), own, None)) is None:
            raise ConfigError(f"{option}: {file} has no class {own}.")
    kinds = _checked(rule, option).state
    return OptimizerEntry(rule, lambda segment: kinds, uniform=True)


def _checked(rule: Any, option: str) -> type[UpdateRule]:
    """Return a class of the user. Raises ConfigError if it is no `UpdateRule` with names of its state."""
    name = getattr(rule, "__name__", str(rule))
    if not (isinstance(rule, type) and issubclass(rule, UpdateRule)):
        raise ConfigError(
            f"{option}: {name} is not a class that is derived from megalite.optimizer.update_rule.UpdateRule."
        )
    if missing := ", ".join(sorted(rule.__abstractmethods__)):
        raise ConfigError(f"{option}: {name} does not define {missing}. Add it.")
    kinds = getattr(rule, "state", None)
    if not isinstance(kinds, tuple) or not all(isinstance(kind, str) and kind for kind in kinds):
        raise ConfigError(
            f"{option}: {name}.state is {kinds!r}. Set it to the names of the numbers that are kept of each "
            'element, for example ("exp_avg",), or () for none.'
        )
    if wrong := [kind for kind in kinds if kind in (WEIGHT, EMA) or kinds.count(kind) > 1]:
        raise ConfigError(f"{option}: {name}.state has {wrong[0]}, a name that is taken. Rename it.")
    return rule
