"""The state of a shell, whose texts can have unknown parts: one private character of Unicode for each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from megalite.config.errors import ConfigError
from megalite.importers.shell.arrays import IndexedArray

FIRST, LAST = 0xF0000, 0xFFFFD
"""The range of private characters of Unicode that stand for unknown parts."""
LONGEST = 1_000_000
"""Limit of the length of a text whose variables are replaced, which is not that of any command."""
Status = bool | None
"""Whether a command succeeds; None if it is not known."""
Value = str | IndexedArray | dict[str, str]
"""The value of a variable: a text, an indexed array, or an associative array."""


class Unknown(NamedTuple):
    """A part that is not known: its text in the script, for example ${MORE}, and why it is not known."""

    source: str
    why: str


class Word(str):
    """A word of a command, its unknown parts shown as in the script."""

    unknown: tuple[Unknown, ...] = ()


@dataclass
class Unknowns:
    """The unknown parts of one script."""

    parts: list[Unknown] = field(default_factory=list)

    def mark(self, source: str, why: str) -> str:
        """The character that stands for an unknown part."""
        part = Unknown(source.strip(), why)
        if part not in self.parts:
            if len(self.parts) > LAST - FIRST:
                raise ConfigError(
                    "the script cannot be read: too much of it comes from outside. Give the command alone."
                )
            self.parts.append(part)
        return chr(FIRST + self.parts.index(part))

    def within(self, text: str) -> tuple[Unknown, ...]:
        return tuple(self.parts[ord(each) - FIRST] for each in text if ord(each) >= FIRST)

    def show(self, text: str) -> str:
        """A text with its unknown parts as in the script."""
        return "".join(self.parts[ord(each) - FIRST].source if ord(each) >= FIRST else each for each in text)

    def word(self, text: str) -> Word:
        word = Word(self.show(text))
        word.unknown = self.within(text)
        return word


def has_unknown(text: str) -> bool:
    return any(ord(each) >= FIRST for each in text)


def checked(text: str) -> str:
    """The text. Raises ConfigError if its variables make it endless."""
    if len(text) > LONGEST:
        excess = f"{text[:40].strip()} … has over {LONGEST} characters where its variables are replaced"
        raise ConfigError(f"the script cannot be read: {excess}. Give the command alone.")
    return text


@dataclass
class ShellState:
    """What a shell holds at one point of a script.

    Attributes:
        variables: by name; one that the script unsets is an empty array.
        withheld: variables that the parent process has and does not export.
        references: names that stand for other variables.
        integers: variables whose assigned values are evaluated as arithmetic.
        arguments: the positional parameters; None: the script's own, which are not known.
        ended: exit, return, break or continue (with a number of loops), once one of them is reached.
        failed: whether the last command is known to have failed.
    """

    variables: dict[str, Value] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    withheld: frozenset[str] = frozenset()
    references: dict[str, str] = field(default_factory=dict)
    integers: frozenset[str] = frozenset()
    arguments: list[str] | None = None
    program: str = ""
    export_all: bool = False
    ended: str = ""
    failed: bool = False

    def fork(self) -> ShellState:
        variables = {
            name: value.copy() if isinstance(value, dict) else value for name, value in self.variables.items()
        }
        copied = (self.withheld, {**self.references}, self.integers)
        return ShellState(
            variables,
            {*self.exported},
            *copied,
            self.arguments,
            self.program,
            self.export_all,
            failed=self.failed,
        )

    def child(self, arguments: list[str] | None, program: str) -> ShellState:
        """The state of a new process: it has what is exported."""
        variables: dict[str, Value] = {
            name: value
            for name, value in self.variables.items()
            if name in self.exported and isinstance(value, str)
        }
        withheld = frozenset(self.variables.keys() - variables.keys())
        return ShellState(variables, {*variables}, withheld, arguments=arguments, program=program)

    def replace(self, other: ShellState) -> None:
        self.variables, self.exported, self.arguments, self.ended = (
            other.variables,
            other.exported,
            other.arguments,
            other.ended,
        )
        self.references, self.integers, self.failed = other.references, other.integers, other.failed

    def named(self, name: str) -> str:
        """The variable that a name stands for."""
        for _ in self.references:
            name = self.references.get(name, name)
        return name

    @property
    def separators(self) -> str:
        """The characters of IFS: words are split at them."""
        value = self.variables.get("IFS")
        return value if isinstance(value, str) else " \t\n"

    def keys(self, name: str) -> list[str] | None:
        """The indices of an array; None if it is not set."""
        value = self.variables.get(self.named(name))
        if value is None or isinstance(value, dict):
            return None if value is None else [*value]
        return [str(index) for index in as_array(value).by_index]

    def unset(self, name: str) -> None:
        """unset NAME."""
        name = self.named(name)
        self.variables[name] = IndexedArray()
        self.exported.discard(name)

    def assign(self, name: str, value: Value) -> None:
        """NAME=VALUE; of an array, a text becomes element 0."""
        name = self.named(name)
        before = self.variables.get(name)
        if isinstance(value, str) and isinstance(before, IndexedArray) and before:
            value = before.with_elements({0: checked(value)})
        self.variables[name] = checked(value) if isinstance(value, str) else value
        if self.export_all:
            self.exported.add(name)

    def append(self, name: str, value: Value) -> None:
        """NAME+=VALUE."""
        before = self.variables.get(self.named(name), IndexedArray())
        if isinstance(before, dict) and isinstance(value, dict):
            self.assign(name, before | value)
        elif isinstance(value, IndexedArray) and not isinstance(before, dict):
            self.assign(name, as_array(before).with_elements(value.by_index))
        elif isinstance(value, str) and not isinstance(before, dict):
            self.assign(name, f"{as_array(before).get(0) or ''}{value}")
        else:
            self.assign(name, value)


def as_array(value: str | IndexedArray) -> IndexedArray:
    """A variable that is a text, as the array whose element 0 is the text."""
    return value if isinstance(value, IndexedArray) else IndexedArray({0: value})


def joined(before: ShellState, ends: list[ShellState], unknowns: Unknowns, why: str) -> ShellState:
    """The state after branches of which it is not known which one was taken: what is equal in all of them is
    known."""
    going = [end for end in ends if end.ended != "exit"] or [before]
    result = going[0].fork()
    result.ended = going[0].ended if len({end.ended for end in going}) == 1 else ""
    result.exported = set.union(*(end.exported for end in going))
    if any(end.arguments != result.arguments for end in going):
        result.arguments = None
    for name in {name: None for end in going for name in end.variables}:
        values = [end.variables.get(name) for end in going]
        if any(value != values[0] for value in values):
            result.variables[name] = _either(name, values, unknowns, why)
    return result


def _either(name: str, values: list[Value | None], unknowns: Unknowns, why: str) -> Value:
    """One of several values: what they begin and end with in common, and between that an unknown part."""
    if any(isinstance(value, IndexedArray) for value in values):
        lists = [
            value.elements if isinstance(value, IndexedArray) else [str(value)] if value else []
            for value in values
        ]
        return IndexedArray.of(_either_list(name, lists, unknowns, why))
    texts = [
        value if isinstance(value, str) else unknowns.mark(f"${name}", "the script does not set it")
        for value in values
    ]
    texts = [*dict.fromkeys(texts)]
    words = [text.split(" ") for text in texts]
    start, end = _common(words)
    if start + end == 0 or not all("--" in text for text in texts):
        return unknowns.mark(f"${name}", _reason(texts, unknowns, why))
    inner = [" ".join(parts[start : len(parts) - end]) for parts in words]
    part = unknowns.mark(f"${name}", _reason(inner, unknowns, why))
    return " ".join([*words[0][:start], part, *words[0][len(words[0]) - end :]])


def _either_list(name: str, values: list[list[str]], unknowns: Unknowns, why: str) -> list[str]:
    start, end = _common(values)
    inner = [*dict.fromkeys(" ".join(value[start : len(value) - end]) for value in values)]
    part = unknowns.mark(f"${name}", _reason(inner, unknowns, why))
    return [*values[0][:start], part, *values[0][len(values[0]) - end :]]


def _common(rows: list[list[str]]) -> tuple[int, int]:
    """How many elements the rows begin with in common, and how many of the rest they end with."""
    shortest = min(map(len, rows))
    start = next((place for place in range(shortest) if len({row[place] for row in rows}) > 1), shortest)
    room = shortest - start
    end = next((place for place in range(room) if len({row[len(row) - 1 - place] for row in rows}) > 1), room)
    return start, end


def _reason(texts: list[str], unknowns: Unknowns, why: str) -> str:
    shown = [" ".join(unknowns.show(text).split()) or "nothing" for text in dict.fromkeys(texts)]
    shown = [text if len(text) <= 80 else f"{text[:77]}..." for text in shown[:6]] + ["..."] * (
        len(shown) > 6
    )
    return f"the script sets it to {' or '.join(dict.fromkeys(shown))}, {why}"
