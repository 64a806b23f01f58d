"""Rules of the configuration and their messages; the rules themselves are in rules/."""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import SequenceMatcher
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalite.config import run_files
from megalite.config.amounts import duration_seconds
from megalite.config.errors import ConfigError
from megalite.stores.url import is_url

if TYPE_CHECKING:
    from megalite.config.rules.context import RuleContext

SIMILAR = 0.6
"""From this ratio of difflib on, a name is taken for another one's misspelling."""


Text = str | Callable[["RuleContext"], str]
Legal = Sequence[Any] | str
"""The legal values or, if they cannot be listed, a sentence that says what to do."""


@dataclass(frozen=True)
class Rule:
    """One check: the error is "option = value message. legal values or way out".

    Attributes:
        broken: returns a true value if the rule is violated.
        value: the value to show; None: the option's value.
        message: what is wrong; {section.key} is replaced by "section.key = value".
    """

    name: str
    option: str
    broken: Callable[["RuleContext"], Any]
    value: Callable[["RuleContext"], Any] | None = None
    message: Text = ""
    legal: Legal | Callable[["RuleContext"], Legal] = ""

    def describe(self, context: "RuleContext") -> str:
        """The message, with the legal values or a way out."""
        legal = self.legal(context) if callable(self.legal) else self.legal
        way_out = legal if isinstance(legal, str) else describe_legal(self.shown(context), legal)
        return f"{self.option} = {show(self.shown(context))} {self.reason(context)}. {way_out}"

    def shown(self, context: "RuleContext") -> Any:
        return (self.value or attrgetter(self.option))(context)

    def reason(self, context: "RuleContext") -> str:
        """What is wrong, without the value and the way out."""

        def named(match: re.Match[str]) -> str:
            return f"{match[1]} = {show(attrgetter(match[1])(context))}"

        return (
            self.message(context) if callable(self.message) else re.sub(r"{(\w+\.\w+)}", named, self.message)
        )


def duration_rule(name: str, option: str, example: str = "1h, 10m or 30s") -> Rule:
    """The rule that an option is a duration, or null if it may be."""
    value = attrgetter(option)
    return Rule(
        name,
        option,
        lambda c: value(c) is not None and not duration_seconds(value(c)),
        message="is not a duration",
        legal=f"Use hours, minutes and seconds in this order: {example}.",
    )


class Mistakes:
    """Collects messages, each of them once, to report all of them together."""

    def __init__(self, messages: tuple[str, ...] | list[str] = ()):
        self.messages = list(dict.fromkeys(messages))

    def add(self, *messages: str) -> None:
        self.messages += [message for message in dict.fromkeys(messages) if message not in self.messages]

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Add the messages of a ConfigError that ends the block, and continue after it."""
        try:
            yield
        except ConfigError as error:
            self.add(*error.messages)

    def report(self) -> None:
        """Raise ConfigError if there are any."""
        if self.messages:
            raise ConfigError(*self.messages)


CHECKPOINT_EXAMPLE = (
    "Give a checkpoint directory, for example runs/NAME/checkpoints/step_00000100, or a run's, runs/NAME, "
    "for its newest."
)


OTHER_PROGRAMS = ("megatron:", "torchtitan:", "dcp:")
"""How names of other programs' checkpoints begin, which `convert import` reads."""


def import_first(path: str) -> str | None:
    """The way out for a checkpoint of another program; None: it is none."""
    name = path if path.startswith(OTHER_PROGRAMS) else f"megatron:{path}"
    if name != path and not os.path.isfile(Path(path, "latest_checkpointed_iteration.txt")):
        return None
    return (
        f"A checkpoint of another program is imported first: run megalite convert import {name} "
        "CHECKPOINT_DIR, and give CHECKPOINT_DIR."
    )


def is_checkpoint(path: str) -> bool:
    """Whether a directory is a published checkpoint, which has a manifest, or that of a run that has saved
    one; or a file, `best` or `latest`, that names one; or the same in a store. Raises StoreError."""
    if is_url(path):
        from megalite.stores.stubs import has_checkpoint

        return has_checkpoint(path)
    if Path(path).name in (run_files.BEST, run_files.LATEST) and os.path.isfile(path):
        return True
    in_run = f"{run_files.CHECKPOINTS}/{run_files.LATEST}"
    return any(os.path.isfile(Path(path) / name) for name in (run_files.MANIFEST, run_files.LATEST, in_run))


def can_be_written(directory: Path) -> bool:
    """Whether a directory can be written to or created."""
    return why_not_written(directory) is None


def why_not_written(directory: Path) -> str | None:
    """What keeps a directory from being written to or created; None: nothing."""
    nearest = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    if not nearest.is_dir():
        return f"{nearest} is not a directory"
    if not os.access(nearest, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        return f"{nearest} is read-only for this user"
    return None


def show(value: Any) -> str:
    """A value as written in YAML."""
    if isinstance(value, str):
        return value or '""'
    return json.dumps(value, default=str, ensure_ascii=False)


def describe_legal(value: Any, legal: Sequence[Any]) -> str:
    """The legal values, if there are at most 12 or none is similar, and the nearest."""
    nearest = nearest_legal(value, legal)
    listed = (
        f"Legal values: {', '.join(map(show, legal))}." if legal and (len(legal) <= 12 or not nearest) else ""
    )
    return f"{listed}{nearest}".strip()


def nearest_legal(value: Any, legal: Sequence[Any]) -> str:
    """The end of a message, with a space before it: the neighbours of a number, or the name that a misspelled
    one is likely to mean.

    Empty if there is no such value.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        neighbours = (
            max((v for v in legal if v < value), default=None),
            min((v for v in legal if v > value), default=None),
        )
        nearest = " or ".join(show(v) for v in neighbours if v is not None)
        return f" Nearest: {nearest}." if nearest else ""
    return suggestion(show(value), [show(v) for v in legal])


def suggestion(name: str, names: Iterable[str]) -> str:
    """The end of a message about an unknown name, with a space before it; empty if none of `names` is
    similar."""
    nearest = nearest_name(name, names)
    return "" if nearest is None else f" Nearest: {nearest}."


def nearest_name(name: str, names: Iterable[str]) -> str | None:
    """The one of `names` that a misspelled name is likely to mean: the most similar, or one that begins so;
    None if there is none."""

    def score(other: str) -> float:
        begins = bool(name) and other.lower().startswith(name.lower())
        return similarity(name.lower(), other.lower()) + begins

    nearest = max(names, key=score, default=None)
    return nearest if nearest is not None and score(nearest) >= SIMILAR else None


def similarity(one: str, other: str) -> float:
    """difflib's ratio of two names: 1 for equal ones."""
    return SequenceMatcher(None, one, other).ratio()


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def multiples(value: int, step: int) -> str:
    """The way out for a value that is not a multiple of step."""
    return f"Legal values: multiples of {step}. Nearest: {' or '.join(map(str, around(value, step)))}."


def around(value: int, step: int) -> list[int]:
    """The positive multiples of step at or next to value."""
    below = value // step * step
    return [multiple for multiple in (below, below + step) if multiple > 0]
