"""What a rule of the configuration is, and how its message is written; the rules themselves are in rules/."""

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from operator import attrgetter
from pathlib import Path
from typing import Any

from megalite.config.dims import ParallelDims
from megalite.config.schema import Config


@dataclass
class Facts(Config):
    """A configuration and where it is to run: what a rule looks at."""

    world_size: int = 1
    local_devices: int | None = None

    @property
    def dims(self) -> ParallelDims:
        return ParallelDims.of(self, self.world_size)


Text = str | Callable[[Facts], str]
Legal = Sequence[Any] | str
"""The legal values or, where they can not be listed, a sentence that says what to do."""


@dataclass(frozen=True)
class Rule:
    """One check: `broken` is true where it is violated, and then it says "option = value why. way out".

    value: what to show, where it is not simply the option's.
    """

    name: str
    option: str
    broken: Callable[[Facts], Any]
    value: Callable[[Facts], Any] | None = None
    why: Text = ""
    legal: Legal | Callable[[Facts], Legal] = ""

    def says(self, why: Text, legal: Legal | Callable[[Facts], Legal]) -> "Rule":
        """The rule with its message. In why, {section.key} becomes "section.key = value"."""
        return replace(self, why=why, legal=legal)

    def message(self, facts: Facts) -> str:
        def named(found: re.Match[str]) -> str:
            return f"{found[1]} = {show(attrgetter(found[1])(facts))}"

        value = (self.value or attrgetter(self.option))(facts)
        why = self.why(facts) if callable(self.why) else re.sub(r"{(\w+\.\w+)}", named, self.why)
        legal = self.legal(facts) if callable(self.legal) else self.legal
        return f"{self.option} = {show(value)} {why}. {legal if isinstance(legal, str) else describe_legal(value, legal)}"


CHECKPOINT_EXAMPLE = "Give a checkpoint directory, for example runs/NAME/checkpoints/step_00000100."


def is_checkpoint(path: str) -> bool:
    """Whether a directory holds a published checkpoint; its manifest is what makes it one."""
    return (Path(path) / "manifest.json").is_file()


def can_be_written(directory: Path) -> bool:
    """Whether a directory may be written to, or made."""
    nearest = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)


def show(value: Any) -> str:
    """A value as one would write it in YAML."""
    if isinstance(value, str):
        return value or '""'
    return json.dumps(value, default=str, ensure_ascii=False)


def describe_legal(value: Any, legal: Sequence[Any]) -> str:
    """The legal values, if there are few, and the nearest: the neighbours of a number, the most similar of names."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        neighbours = max((v for v in legal if v < value), default=None), min((v for v in legal if v > value), default=None)
        nearest = " or ".join(show(v) for v in neighbours if v is not None)
    else:
        nearest = nearest_name(show(value), [show(v) for v in legal])
    listed = f"Legal values: {', '.join(map(show, legal))}. " if len(legal) <= 12 else ""
    return f"{listed}Nearest: {nearest}."


def nearest_name(name: str, names: Sequence[str]) -> str:
    """The most similar of names, the earlier one where two are equally similar."""
    return max(names, key=lambda other: SequenceMatcher(None, name, other).ratio())


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def around(value: int, step: int) -> list[int]:
    """The multiples of step next to value, at least one step."""
    below = value // step * step
    return [multiple for multiple in (below, below + step) if multiple > 0]
