"""What files of the user add to megalite (`run.extensions`): objectives, optimizers, data sources, observers.

    from megalite.config.extensions import DataSource, data_source, objective, observer, optimizer

The files are imported before options are checked, so that options may name what they register. Imports no
torch and no numpy.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, TypeVar

from megalite.config.errors import ConfigError

Registered = TypeVar("Registered", bound=type)


class DataSource(ABC):
    """Rows of tokens of the user's own, by their index.

    It is made from the text after NAME: in data.train or data.validation and from data.sequence_length, on
    every rank. Rows are shuffled, distributed and resumed as those of token files: `row` must return the same
    for the same index, on every rank and in every run.

    Attributes:
        vocab_size: number of token ids; None: not known, and model.vocab_size must be set.
    """

    vocab_size: ClassVar[int | None] = None

    def __init__(self, argument: str, sequence_length: int):
        self.argument, self.sequence_length = argument, sequence_length

    @property
    def fingerprint(self) -> str:
        """Return a text that identifies the content. A run that resumes with another one is rejected."""
        return self.argument

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of rows before they repeat."""

    @abstractmethod
    def row(self, index: int) -> Sequence[int]:
        """Return the token ids of a row, sequence_length + 1: the last one is only predicted."""


@dataclass
class Extensions:
    """What has been registered, by name.

    Attributes:
        files: those that have been imported.
        observers: classes derived from `megalite.monitoring.observers.Observer`, made with the trainer.
    """

    files: dict[Path, ModuleType] = field(default_factory=dict)
    objectives: dict[str, type] = field(default_factory=dict)
    optimizers: dict[str, type] = field(default_factory=dict)
    sources: dict[str, type[DataSource]] = field(default_factory=dict)
    observers: list[type] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.objectives) + len(self.optimizers) + len(self.sources) + len(self.observers)


EXTENSIONS = Extensions()
BUILT_IN: dict[str, Collection[str]] = {}
"""Names that are taken, by what they are names of."""


def objective(name: str) -> Callable[[Registered], Registered]:
    """Register a class derived from `megalite.objectives.objective.Objective` for train.objective."""
    return _into(EXTENSIONS.objectives, name, "objective")


def optimizer(name: str) -> Callable[[Registered], Registered]:
    """Register a class derived from `megalite.optimizer.update_rule.UpdateRule` for optimizer.name."""
    return _into(EXTENSIONS.optimizers, name, "optimizer")


def data_source(name: str) -> Callable[[Registered], Registered]:
    """Register a class derived from `DataSource`: data.train = NAME:ARGUMENT."""
    return _into(EXTENSIONS.sources, name, "data source")


def observer(kind: Registered) -> Registered:
    """Register a class derived from `megalite.monitoring.observers.Observer`. Every run has one, on every
    rank."""
    EXTENSIONS.observers.append(kind)
    return kind


def _into(table: dict[str, Any], name: str, what: str) -> Callable[[Registered], Registered]:
    one = f"{'an' if what[0] in 'aeiou' else 'a'} {what}"

    def add(kind: Registered) -> Registered:
        if not name or ":" in name or "/" in name:
            raise ConfigError(f"{name!r} is not a name of {one}: it must have no : and no /.")
        if name in BUILT_IN.get(what, ()):
            raise ConfigError(f"{name} is the name of {one} of megalite. Choose another one.")
        if name in table:
            raise ConfigError(f"there are two of the {what} {name}. Rename one of them.")
        table[name] = kind
        return kind

    return add


def load_extensions(paths: Sequence[str] | None) -> None:
    """Import files that are not imported yet.

    Raises:
        ConfigError: a file is missing, cannot be imported, or registers nothing.
    """
    for path in paths or ():
        option, before = f"run.extensions = {path}", len(EXTENSIONS)
        known = Path(path).expanduser().resolve() in EXTENSIONS.files
        import_file(Path(path).expanduser(), option)
        if not known and len(EXTENSIONS) == before:
            raise ConfigError(
                f"{option} registers nothing. Put @objective, @optimizer, @data_source or @observer of "
                "megalite.config.extensions before a class in it, or remove it."
            )


def import_file(file: Path, option: str) -> ModuleType:
    """Return the module of a file, which is imported once.

    Args:
        option: the option with its value, for messages.

    Raises:
        ConfigError: there is no such file, or it cannot be imported.
    """
    place = file.resolve()
    if place in EXTENSIONS.files:
        return EXTENSIONS.files[place]
    if not file.is_file():
        raise ConfigError(f"{option}: there is no file {file.absolute()}. Correct its path.")
    key = f"megalite extension {place}"  # in sys.modules, as dataclasses and pickle need it
    spec = importlib.util.spec_from_file_location(key, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{option}: {file} is not a Python file. Its name must end in .py.")
    module = sys.modules[key] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[key]
        frames, names = traceback.extract_tb(error.__traceback__), (str(file), str(file.absolute()))
        lines = [frame.lineno for frame in frames if frame.filename in names]
        where = f" line {lines[-1]}" if lines else ""
        kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
        raise ConfigError(f"{option}: {file}{where} cannot be imported ({kind}{error}).") from error
    EXTENSIONS.files[place] = module
    return module


def is_source(source: Any) -> bool:
    """Return whether a value of data.train or data.validation names a data source."""
    return isinstance(source, str) and source.partition(":")[0] in EXTENSIONS.sources


def is_own_objective(name: str) -> bool:
    """Return whether train.objective names an objective of the user: FILE:CLASS, or a registered name."""
    return ".py:" in name or name in EXTENSIONS.objectives


def is_own_optimizer(name: str) -> bool:
    """Return whether optimizer.name names an optimizer of the user: FILE:CLASS, or a registered name."""
    return ".py:" in name or name in EXTENSIONS.optimizers


@lru_cache(maxsize=8)
def source_of(source: str, sequence_length: int) -> DataSource:
    """Return the data source that data.train or data.validation names.

    Raises:
        ConfigError: it cannot be made, or has no rows.
    """
    name, _, argument = source.partition(":")
    kind = EXTENSIONS.sources[name]
    try:
        rows = kind(argument, sequence_length)
        length = len(rows)
    except Exception as error:
        raise ConfigError(
            f"the data source {source} cannot be made ({type(error).__name__}: {error}). Correct "
            f"{kind.__name__} or the text after {name}:."
        ) from error
    if length < 1:
        raise ConfigError(f"the data source {source} has no rows. Correct {kind.__name__}.__len__.")
    return rows
