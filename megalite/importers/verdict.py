"""Conversion rules of keys: the rows of the tables in the files of the projects."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

_INTEGER = re.compile(r"[-+]?(?:0|[1-9]\d{0,17})")
_NUMBER = re.compile(r"[-+]?(?:(?:0|[1-9]\d*)\.\d*|\.\d+|(?:0|[1-9]\d*)(?=[eE]))(?:[eE][-+]?\d{1,3})?")
Kind = Literal["honoured", "approximate", "assumed", "open", "lost", "harmless"]
"""assumed: the file does not have the key, and its default differs from ours; open: the file leaves it to the
user."""


class Verdict(NamedTuple):
    """The result for a key: the options that it sets, and the reason if they do not express all of it."""

    kind: Kind
    options: dict[str, Any]
    why: str = ""


class KeyRule(NamedTuple):
    """The function that converts a key's value, and the option that corresponds to the key.

    Attributes:
        of_null: the verdict on a key that the file leaves empty; None: such a key has its default.
    """

    judge: Callable[[Any, ImportedFile], Verdict]
    option: str | None = None
    of_null: Verdict | None = None


Table = dict[str, KeyRule]
"""section.key → its row; a name that ends in * is the row of all other keys that begin so."""


def row_of(table: Table, key: str) -> KeyRule | None:
    """Return the row of a key, or None for an unknown key."""
    begins = [name for name in table if name.endswith("*") and key.startswith(name[:-1])]
    return table.get(key) or (table[max(begins, key=len)] if begins else None)


@dataclass(frozen=True)
class ImportedFile:
    """Configuration of another project.

    Attributes:
        leaves: section.key → value.
        dp: number of data-parallel ranks, or None if it is unknown.
        defaults: values that the project uses for missing keys.
    """

    leaves: dict[str, Any]
    dp: int | None = None
    defaults: dict[str, Any] = field(default_factory=dict)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value, or None if it is empty or auto. A missing key has the default."""
        value = self.leaves.get(key, self.defaults.get(key, default))
        return None if value == "auto" else value

    def word(self, key: str, default: Any = None) -> str:
        return word(self.get(key, default))

    def size(self, key: str) -> int | None:
        """Return a positive integer, or None for other values."""
        value = self.get(key)
        return int(value) if type(value) in (int, float) and value > 0 and value % 1 == 0 else None

    def count(self, key: str, default: int = 1) -> int | None:
        """Return a positive integer, or None for other values."""
        return self.size(key) if key in self.leaves or key in self.defaults else default

    def unsettled(self) -> list[str]:
        """Return keys such as ${MORE}, which the script does not set and which may contain further keys."""
        return [key for key in self.leaves if key[:1] in ("$", "<")]

    def number(self, key: str) -> float | None:
        """Return a number, or None for other values."""
        value = self.get(key)
        return value if type(value) in (int, float) else None

    def on(self, key: str) -> bool:
        """Return whether a switch is on."""
        return self.get(key) is True


def plain(value: Any) -> Any:
    """Convert text that represents a number or a boolean, also in lists.

    Many projects convert a quoted "2e-5" themselves.
    """
    if isinstance(value, list):
        return [plain(each) for each in value]
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else value


def word(value: Any) -> str:
    """Return a value in the notation of the tables, for example TRUE, 2 or CPU."""
    return f"{value:.15g}" if type(value) in (int, float) else str(value).upper()


def rounded(value: float) -> float:
    """Return a value rounded to 12 digits, without the rounding error of a product."""
    return float(f"{value:.12g}")


def honoured(options: dict[str, Any], roughly: str = "") -> Verdict:
    return Verdict("approximate" if roughly else "honoured", options, roughly)


def lost(why: str) -> Verdict:
    return Verdict("lost", {}, why)


def harmless(why: str) -> Verdict:
    return Verdict("harmless", {}, why)


def left(why: str) -> Verdict:
    """Return the file leaves something to the user."""
    return Verdict("open", {}, why)


def sets(
    option: str, values: dict[str, Any] | None = None, why: str = "", roughly: str = "", scale: float = 1
) -> KeyRule:
    """Return a row that sets the option to the value, multiplied by `scale` or mapped by `values`.

    Values that `values` does not contain are lost.
    """

    def judge(value: Any, source: ImportedFile) -> Verdict:
        if values is None:
            return honoured(
                {option: rounded(value * scale) if scale != 1 and type(value) in (int, float) else value},
                roughly,
            )
        return honoured({option: values[word(value)]}, roughly) if word(value) in values else lost(why)

    return KeyRule(judge, option)


def only(words: str, why: str, here: str = "this is always the case") -> KeyRule:
    """Return a row that is harmless for these words and lost for other values."""
    return KeyRule(lambda value, source: harmless(here) if word(value) in words.split() else lost(why))


def optimizer(adams: str, roughly: str = "") -> KeyRule:
    """Return the row of the optimizer's name: another one of megalite, or one of these names of AdamW."""
    others = sets(
        "optimizer.name",
        {"MUON": "muon", "LION": "lion", "ADEMAMIX": "ademamix"},
        "optimizer.name must be adamw, muon, lion or ademamix: set optimizer.* for the closest one",
        roughly,
    )
    return KeyRule(
        lambda value, source: (
            harmless("AdamW is the default") if word(value) in adams.split() else others.judge(value, source)
        )
    )


def never(reason: str) -> KeyRule:
    """Return a row that is harmless for any value."""
    return KeyRule(lambda value, source: harmless(reason))


def to_do(why: str) -> KeyRule:
    """Return a row for a key that leaves something to the user, with any value."""
    return KeyRule(lambda value, source: left(why))


def missing(why: str) -> KeyRule:
    """Return a row that is lost for any value that enables something."""
    return KeyRule(
        lambda value, source: (
            harmless("disabled") if word(value) in ("FALSE", "0", "NONE", "NO") else lost(why)
        )
    )


def each(prefix: str, keys: str, row: KeyRule) -> Table:
    """Return the same row for several keys."""
    return {prefix + key: row for key in keys.split()}
