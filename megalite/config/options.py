"""The names of all options, and which of them an unknown name is likely to mean. Imports no torch."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import Field, fields
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from typing import Any

from megalite.config.errors import ConfigError
from megalite.config.schema import Config

SHORT = {**{name: f"parallel.{name}" for name in ("tp", "pp", "dp", "cp", "ep", "zero")}, "faults": "faults.inject"}
SECTIONS = [section.name for section in fields(Config)]
OPTIONS: dict[str, Field[Any]] = {f"{section.name}.{key.name}": key for section in fields(Config) for key in fields(section.type)}  # type: ignore[arg-type]
"""Every option, section.key → its dataclass field."""
SIMILAR = 0.6
"""From this ratio of difflib on, a section's name is taken for another one's misspelling."""


@cache
def other_names() -> dict[str, str]:
    """What other projects call an option → what to write here."""
    import yaml

    table = yaml.safe_load(Path(__file__).with_name("other_names.yaml").read_text(encoding="utf-8"))
    return {name: here for here, *names in table for name in names}


def named_in(text: str) -> set[str]:
    """The options that a text names."""
    return set(re.findall(r"\w+\.\w+", text)) & OPTIONS.keys()


def unknown(name: str, source: str, known: Iterable[str], dashes: str = "") -> ConfigError:
    """The error for an unknown key: names the options with the same last part, the one that other projects call so, or the most similar.

    Args:
        name: the key, with its section if it has one.
        source: where it was, for the message.
        known: names besides those of the options that are valid there, such as --config.
        dashes: what precedes an option's name there.
    """
    said = f"{dashes}{name} {source} is not a known option."
    section, _, last = name.rpartition(".")
    same = _in_section(section, [option for option in OPTIONS if _bare(option) == _plain(last)])
    if same:
        return ConfigError(f"{said} Nearest: {' or '.join(f'{dashes}{option}' for option in same)}.")
    others = other_names()
    if (here := others.get(last.replace("-", "_").lower())) is not None:
        return ConfigError(f"{said} Here it is called {_written(here, dashes)}.")
    nearest = _most_similar(section, last, [*known, *OPTIONS, *others])
    if nearest in others:
        return ConfigError(f"{said} Nearest: {_written(others[nearest], dashes)}, which other programs call {nearest}.")
    return ConfigError(f"{said} Nearest: {dashes}{nearest}.")


def _written(here: str, dashes: str) -> str:
    """An entry of `other_names` where options begin with dashes; an explanation has none."""
    return here if " = " in here else f"{dashes}{here}"


def _plain(word: str) -> str:
    return word.replace("-", "").replace("_", "").lower()


def _bare(option: str) -> str:
    """The last part of an option without underscores."""
    return _plain(option.rpartition(".")[2])


def _in_section(section: str, options: Sequence[str]) -> Sequence[str]:
    """The options whose section a misspelled one means; all of them if it means none of theirs."""
    scores = {option: similarity(section, option.partition(".")[0]) for option in options}
    near = [option for option in options if section and scores[option] == max(scores.values()) >= SIMILAR]
    return near or options


def _most_similar(section: str, last: str, names: Sequence[str]) -> str:
    """The name whose last part is the most similar, with a small advantage for the same section; the first of equally similar ones."""
    others, options = other_names(), frozenset(OPTIONS)

    def score(name: str) -> float:
        place = name if name in options else others.get(name, "")
        own = similarity(section, place.partition(".")[0]) if section and place else 0.0
        return similarity(_plain(last), _bare(name)) + 0.1 * own

    return max(names, key=score)


def similarity(one: str, other: str) -> float:
    """difflib's ratio of two names: 1 for equal ones."""
    return SequenceMatcher(None, one, other).ratio()
