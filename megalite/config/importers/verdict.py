"""How a key of another program's configuration is judged: the rows that the tables of deepspeed.py and accelerate.py consist of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Kind = Literal["honoured", "approximate", "assumed", "open", "lost", "harmless"]
"""assumed: the file leaves the key out, and its default there is not ours; open: the file leaves it to whoever runs it."""


class Verdict(NamedTuple):
    """What becomes of a key: the options that it sets, and why, where that is not all that it says."""

    kind: Kind
    options: dict[str, Any]
    why: str = ""


class Row(NamedTuple):
    """How a key's value is judged, and the option that it is about."""

    judge: Callable[[Any, Source], Verdict]
    option: str | None = None


Table = dict[str, Row]
"""section.key → its row; section.* stands for every other key of a section."""


@dataclass(frozen=True)
class Source:
    """The leaves of a file, section.key → value, and its number of data-parallel ranks, where that is known."""

    leaves: dict[str, Any]
    dp: int | None = None

    def get(self, key: str, default: Any = None) -> Any:
        """A value, or the default of a key that is not there; None where it is empty or auto."""
        value = self.leaves.get(key, default)
        return None if value == "auto" else value

    def word(self, key: str, default: Any = None) -> str:
        return word(self.get(key, default))

    def size(self, key: str) -> int | None:
        """A positive whole number; None where the file says none."""
        value = self.get(key)
        return int(value) if type(value) in (int, float) and value > 0 and value % 1 == 0 else None


def word(value: Any) -> str:
    """A value as the tables write it, for example TRUE, 2 or CPU."""
    return f"{value:.15g}" if type(value) in (int, float) else str(value).upper()


def rounded(value: float) -> float:
    """Without the last digits, which a product leaves behind."""
    return float(f"{value:.12g}")


def honoured(options: dict[str, Any], roughly: str = "") -> Verdict:
    return Verdict("approximate" if roughly else "honoured", options, roughly)


def lost(why: str) -> Verdict:
    return Verdict("lost", {}, why)


def harmless(why: str) -> Verdict:
    return Verdict("harmless", {}, why)


def sets(option: str, values: dict[str, Any] | None = None, why: str = "", roughly: str = "", scale: float = 1) -> Row:
    """The value becomes the option's: times `scale`, or through `values` by its word; what they do not have is lost."""

    def judge(value: Any, source: Source) -> Verdict:
        if values is None:
            return honoured({option: rounded(value * scale) if scale != 1 and type(value) in (int, float) else value}, roughly)
        return honoured({option: values[word(value)]}, roughly) if word(value) in values else lost(why)

    return Row(judge, option)


def only(words: str, why: str, here: str = "it is so here") -> Row:
    """With one of these words nothing is lost; with any other value something is."""
    return Row(lambda value, source: harmless(here) if word(value) in words.split() else lost(why))


def never(reason: str) -> Row:
    """Means nothing here, whatever its value."""
    return Row(lambda value, source: harmless(reason))


def each(prefix: str, keys: str, row: Row) -> Table:
    """The same row for several keys."""
    return {prefix + key: row for key in keys.split()}
