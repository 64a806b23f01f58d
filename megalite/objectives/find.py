"""Objectives by name (`train.objective`): those of this package, and a user's own in a file."""

from __future__ import annotations

import importlib.util
import sys
from importlib import import_module
from pathlib import Path

from megalite.config.errors import ConfigError
from megalite.config.rule import suggestion
from megalite.config.schema import Config
from megalite.objectives.objective import Objective

NEXT_TOKEN = "cross_entropy"
OBJECTIVES = {
    NEXT_TOKEN: ("cross_entropy", "NextToken"),
    "dpo": ("dpo", "DPO"),
    "ipo": ("ipo", "IPO"),
    "simpo": ("simpo", "SimPO"),
    "cpo": ("cpo", "CPO"),
    "orpo": ("orpo", "ORPO"),
    "kto": ("kto", "KTO"),
    "reward": ("reward", "Reward"),
    "distillation": ("distillation", "Distillation"),
}
"""Name → module of this package and class."""
KINDS_OF_DATA = ("pairs", "labelled")
"""`Objective.data` of an objective over sequences."""


def objective_class(name: str) -> type[Objective]:
    """Return the class of an objective: a name of OBJECTIVES, or FILE:CLASS.

    Raises:
        ConfigError: there is no such objective.
    """
    if name in OBJECTIVES:
        module, own = OBJECTIVES[name]
        known: type[Objective] = getattr(import_module(f"megalite.objectives.{module}"), own)
        return known
    file, separator, own = name.rpartition(":")
    if not (separator and file.endswith(".py")):
        legal = f"Legal values: {', '.join(OBJECTIVES)}, or FILE:CLASS for your own."
        raise ConfigError(f"train.objective = {name} is unknown. {legal}{suggestion(name, OBJECTIVES)}")
    return _own_class(Path(file).expanduser(), own)


def _own_class(file: Path, name: str) -> type[Objective]:
    """Return the class of a user's file."""
    option = f"train.objective = {file}:{name}"
    if not file.is_file():
        raise ConfigError(f"{option}: there is no file {file.absolute()}. Correct its path.")
    key = f"objective of {file.absolute()}"  # in sys.modules, as dataclasses and pickle need it
    if (module := sys.modules.get(key)) is None:
        spec = importlib.util.spec_from_file_location(key, file)
        assert spec is not None and spec.loader is not None, "a file that ends in .py has a loader"
        module = sys.modules[key] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[key]
            raise ConfigError(
                f"{option}: {file} cannot be imported ({type(error).__name__}: {error})."
            ) from error
    objective = getattr(module, name, None)
    if not (isinstance(objective, type) and issubclass(objective, Objective)):
        kinds = "Objective, PairObjective or another class of megalite.objectives"
        raise ConfigError(f"{option}: {file} has no class {name} that is derived from {kinds}.")
    if missing := ", ".join(sorted(objective.__abstractmethods__)):
        raise ConfigError(f"{option}: {name} does not define {missing}. Add it.")
    if (data := getattr(objective, "data", None)) not in KINDS_OF_DATA:
        legal = " or ".join(map(repr, KINDS_OF_DATA))
        raise ConfigError(
            f"{option}: {name}.data is {data!r}, but your own objective is over sequences. Set it to {legal}."
        )
    return objective


def objective_of(config: Config) -> Objective | None:
    """Return the objective of a run over sequences; None for the cross-entropy of the next token."""
    kind = objective_class(config.train.objective)
    return None if kind.data == "tokens" else kind(config.preference)
