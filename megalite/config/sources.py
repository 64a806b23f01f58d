"""The places that options come from, files and the command line, and which of them counts.

What is said later wins, option by option. Some options stand for several: a number of tokens for the number
of steps, a preset or a Hugging Face model for a whole shape. A later source that gives one of those replaces
all that earlier sources said about the same thing; within one source it comes first, and the single options
beside it change it.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from megalite.config.errors import ConfigError
from megalite.config.rule import Mistakes, show
from megalite.config.sections.model import ModelConfig

HORIZON = ("train.steps", "train.tokens", "train.epochs")
"""Options that say how long the run is: one of them replaces the others."""
SHAPES = ("model.preset", "model.from_hf")
"""Options that stand for the whole shape of a model."""
WEIGHTS = "model.init_from"
SHAPE = frozenset(f"model.{key.name}" for key in fields(ModelConfig)) - {WEIGHTS, "model.resize_embeddings"}


@dataclass(frozen=True)
class OptionSource:
    """The options that one place gives.

    Attributes:
        name: the file, or "command line".
        where: the same in messages, such as "in run.yaml".
        options: section.key → value, converted to the option's type.
    """

    name: str
    where: str
    options: dict[str, Any]

    def gives(self, options: Sequence[str]) -> list[str]:
        """Those of the options that have a value here."""
        return [option for option in options if self.options.get(option) is not None]


@dataclass
class Given:
    """What all sources together say.

    Attributes:
        values: section.key → value.
        origins: section.key → the source that its value is from.
        advice: lines about former names of options.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, OptionSource] = field(default_factory=dict)
    advice: list[str] = field(default_factory=list)

    def drop(self, options: Sequence[str] | frozenset[str]) -> list[str]:
        """Forget these options. Returns those that had a value."""
        gone = [option for option in options if self.values.pop(option, None) is not None]
        self.origins = {option: source for option, source in self.origins.items() if option in self.values}
        return gone


def combined(sources: Sequence[OptionSource]) -> Given:
    """What the sources say, in order. Raises ConfigError if one of them says two things at once, or keeps the
    weights of another model."""
    given, mistakes = Given(), Mistakes()
    for source in sources:
        with mistakes.collected():
            _replace_horizon(given, source)
        with mistakes.collected():
            _replace_shape(given, source)
        given.values |= source.options
        given.origins |= dict.fromkeys(source.options, source)
    mistakes.report()
    return given


def _replace_horizon(given: Given, later: OptionSource) -> None:
    horizons = later.gives(HORIZON)
    if len(horizons) > 1:
        both = " and ".join(f"{option} = {show(later.options[option])}" for option in horizons)
        raise ConfigError(f"{both} {later.where} both set the length of the run. Set only one of them.")
    if horizons:
        given.drop(HORIZON)


def _replace_shape(given: Given, later: OptionSource) -> None:
    shapes = later.gives(SHAPES)
    if not shapes:
        return
    option = shapes[0]
    named_again = given.values.get(option) == later.options[option]
    replaced = given.drop(SHAPE)
    weights = given.values.get(WEIGHTS)
    if named_again or not replaced or weights in (None, "none") or WEIGHTS in later.options:
        return
    name, before = later.options[option], given.origins[WEIGHTS].where
    if option == "model.from_hf" and _repository(name) == _repository(weights):
        return
    own = f"hf:{name.removeprefix('hf:')}" if option == "model.from_hf" else "weights of that shape"
    raise ConfigError(
        f"{WEIGHTS} = {weights} {before} belongs to the model that was set there, but {option} = {name} "
        f"{later.where} "
        "replaces it. "
        f"Set {WEIGHTS} to {own}, or to none for random weights."
    )


def _repository(name: str) -> str:
    """What identifies a Hugging Face model: org/name or its directory."""
    from megalite.families.hub import repository

    path = os.path.expanduser(name.removeprefix("hf:"))
    return repository(os.path.abspath(path) if os.path.exists(path) else os.path.normpath(path))
