"""The conditions of [ … ], [[ … ]] and test, as far as they are known: true, false, or None."""

from __future__ import annotations

import re
from typing import NamedTuple

from megalite.importers.shell import globs
from megalite.importers.shell.values import has_unknown

_ORDERS = {"-eq": (0,), "-ne": (-1, 1), "-lt": (-1,), "-le": (-1, 0), "-gt": (1,), "-ge": (0, 1)}
_UNARY = {f"-{letter}" for letter in "abcdefghknoprstuvwxzGLNOS"}


class Token(NamedTuple):
    """A word or an operator of a condition.

    Attributes:
        quoted: whether all of it is quoted.
        glob, regular: its pattern after == and =~; None if unknown.
    """

    text: str
    quoted: bool = False
    glob: str = ""
    regular: str | None = ""


def negated(value: bool | None) -> bool | None:
    return None if value is None else not value


def both(left: bool | None, right: bool | None) -> bool | None:
    return False if left is False or right is False else None if left is None or right is None else True


class Condition:
    """A parser of the tokens of one condition.

    Args:
        double: whether it is [[ … ]], where == compares with a pattern.

    Attributes:
        groups: what a regular expression of the condition and its parentheses have matched; None without one.
    """

    def __init__(self, tokens: list[Token], double: bool) -> None:
        self.tokens, self.double, self.place = tokens, double, 0
        self.groups: list[str] | None = None

    def value(self) -> bool | None:
        status = self._any() if self.tokens else False
        return status if self.place >= len(self.tokens) else None

    def _peek(self, ahead: int = 0) -> str:
        place = self.place + ahead
        return self.tokens[place].text if place < len(self.tokens) else ""

    def _operator(self, *names: str) -> bool:
        if self._peek() in names and self.place < len(self.tokens) and not self.tokens[self.place].quoted:
            self.place += 1
            return True
        return False

    def _any(self) -> bool | None:
        value = self._all()
        while self._operator("||", "-o"):
            value = negated(both(negated(value), negated(self._all())))
        return value

    def _all(self) -> bool | None:
        value = self._one()
        while self._operator("&&", "-a"):
            value = both(value, self._one())
        return value

    def _one(self) -> bool | None:
        if self._operator("!"):
            return negated(self._one())
        if self._operator("("):
            value = self._any()
            self._operator(")")
            return value
        if (
            self._peek() in _UNARY
            and self._peek(1) not in ("", "&&", "||", "=", "==", "!=")
            or self._lone_unary()
        ):
            name, text = self._peek(), self._peek(1)
            self.place += 2
            return self._unary(name, text)
        left = self._peek()
        self.place += 1
        sign = self._peek()
        if sign in ("=", "==", "!=", "=~", "<", ">") or sign in _ORDERS or sign in ("-nt", "-ot", "-ef"):
            right = self.tokens[self.place + 1] if self.place + 1 < len(self.tokens) else Token("", True)
            self.place += 2
            return self._compare(left, sign, right)
        return self._unary("-n", left)

    def _lone_unary(self) -> bool:
        """Evaluate -z or -n before an empty word."""
        return (
            self._peek() in ("-z", "-n")
            and self.place + 1 < len(self.tokens)
            and self.tokens[self.place + 1].text == ""
        )

    def _unary(self, name: str, text: str) -> bool | None:
        if name not in ("-n", "-z"):
            return None
        known = "".join(each for each in text if not has_unknown(each))
        filled = True if known else None if text else False
        return filled if name == "-n" else negated(filled)

    def _compare(self, left: str, sign: str, right: Token) -> bool | None:
        if has_unknown(left) or has_unknown(right.text):
            return None
        if sign in _ORDERS:
            try:
                difference = int(left or "0") - int(right.text or "0")
            except ValueError:
                return None
            return (difference > 0) - (difference < 0) in _ORDERS[sign]
        if sign in ("=", "==", "!="):
            same = (
                globs.regular(right.glob).fullmatch(left) is not None if self.double else left == right.text
            )
            return same if sign != "!=" else not same
        if sign == "=~":
            return self._searched(left, right)
        return (left < right.text) == (sign == "<") and left != right.text if sign in "<>" else None

    def _searched(self, left: str, right: Token) -> bool | None:
        if right.regular is None:
            return None
        try:
            match = re.search(right.regular, left)
        except re.error:
            return None
        self.groups = [match[0], *(group or "" for group in match.groups())] if match else []
        return match is not None


def matches(text: str, patterns: list[Token]) -> bool | None:
    """Return whether one of the patterns of a case matches."""
    if has_unknown(text) or any(has_unknown(pattern.text) for pattern in patterns):
        return True if any(pattern.text == "*" and not pattern.quoted for pattern in patterns) else None
    return any(globs.regular(pattern.glob).fullmatch(text) is not None for pattern in patterns)
