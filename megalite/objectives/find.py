"""Objectives by name (`train.objective`): those of this package, and a user's own in a file."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from megalite.config.errors import ConfigError
from megalite.config.extensions import BUILT_IN, EXTENSIONS, import_file
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
BUILT_IN["objective"] = OBJECTIVES
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
    option = f"train.objective = {name}"
    if (registered := EXTENSIONS.objectives.get(name)) is not None:
        return _checked(registered, option)
    file, separator, own = name.rpartition(":")
    if not (separator and file.endswith(".py")):
        names = (*OBJECTIVES, *EXTENSIONS.objectives)
        legal = (
            f"Legal values: {', '.join(names)}, FILE:CLASS for your own, or a name that a file in "
            "run.extensions registers."
        )
        raise ConfigError(f"{option} is unknown. {legal}{suggestion(name, names)}")
    path = Path(file).expanduser()
    if (objective := getattr(import_file(path, option), own, None)) is None:
        raise ConfigError(f"{option}: {file} has no class {own}.")
    return _checked(objective, option)


def _checked(objective: Any, option: str) -> type[Objective]:
    """Return a class of the user. Raises ConfigError if it is no objective over sequences."""
    name = getattr(objective, "__name__", str(objective))
    if not (isinstance(objective, type) and issubclass(objective, Objective)):
        kinds = "Objective, PairObjective or another class of megalite.objectives"
        raise ConfigError(f"{option}: {name} is not a class that is derived from {kinds}.")
    if missing := ", ".join(sorted(objective.__abstractmethods__)):
        raise ConfigError(f"{option}: {name} does not define {missing}. Add it.")
    if (data := getattr(objective, "data", None)) not in KINDS_OF_DATA:
        legal = " or ".join(map(repr, KINDS_OF_DATA))
        raise ConfigError(
            f"{option}: {name}.data is {data!r}, but your own objective is over sequences. Set it to {legal}."
        )
    if objective.reads not in ("likelihoods", "rewards"):
        raise ConfigError(
            f"{option}: {name}.reads is {objective.reads!r}. Set it to 'likelihoods' or 'rewards'."
        )
    others = objective.data != "pairs" or objective.needs_reference or objective.needs_baseline
    if objective.reads == "rewards" and others:
        raise ConfigError(
            f"{option}: {name} reads rewards, which only pairs without a reference model have. Set its data "
            "to 'pairs', and needs_reference and needs_baseline to False."
        )
    return objective


def objective_of(config: Config) -> Objective | None:
    """Return the objective of a run over sequences; None for the cross-entropy of the next token."""
    kind = objective_class(config.train.objective)
    return None if kind.data == "tokens" else kind(config.preference)
