"""The integer arithmetic of $((…)), ((…)), let and expr."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

Thunk = Callable[[], int]
_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+#[\w@]+|0[xX][\da-fA-F]+|\d+(?![\w@#]))|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<sign><<=|>>=|\+\+|--|\*\*|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|[-+*/%&|^<>=!~?:,()\[\]]))"
)
_LEVELS: tuple[tuple[str, ...], ...] = (
    *(
        ("||",),
        ("&&",),
        ("|",),
        ("^",),
        ("&",),
        ("==", "!="),
        ("<", "<=", ">", ">="),
        ("<<", ">>"),
        ("+", "-"),
        ("*", "/", "%"),
    ),
)
"""Binary operators, those that bind least first."""
_ASSIGNMENTS = frozenset(("=", "+=", "-=", "*=", "/=", "%=", "<<=", ">>=", "&=", "^=", "|="))
LARGEST = 1 << 63


class NotKnown(ValueError):
    """The expression has a part without a known value, or is more than integer arithmetic."""


def _quotient(left: int, right: int) -> int:
    if right == 0:
        raise NotKnown("division by zero")
    return abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)


def _bounded(operation: Callable[[int, int], int]) -> Callable[[int, int], int]:
    """Return an operation with exponents of at most 64 bits."""

    def run(left: int, right: int) -> int:
        if not 0 <= right < 64:
            raise NotKnown("exponent out of range")
        return operation(left, right)

    return run


_BINARY: dict[str, Callable[[int, int], int]] = {
    **{
        "+": operator.add,
        "-": operator.sub,
        "*": operator.mul,
        "&": operator.and_,
        "|": operator.or_,
        "^": operator.xor,
    },
    **{
        "==": operator.eq,
        "!=": operator.ne,
        "<": operator.lt,
        "<=": operator.le,
        ">": operator.gt,
        ">=": operator.ge,
    },
    **{
        "/": _quotient,
        "%": lambda left, right: left - _quotient(left, right) * right,
        "**": _bounded(operator.pow),
    },
    **{"<<": _bounded(operator.lshift), ">>": _bounded(operator.rshift)},
}
_UNARY: dict[str, Callable[[int], int]] = {
    "-": operator.neg,
    "+": operator.pos,
    "~": operator.invert,
    "!": lambda value: int(not value),
}


def calculate(text: str, read: Callable[[str], str | None], write: Callable[[str, str], None]) -> int:
    """Evaluate an expression and apply its assignments.

    Args:
        read: a variable's text, None if it is not known; an element of an array is NAME[NUMBER].
        write: sets a variable.

    Raises:
        NotKnown: it cannot be computed.
    """
    return _Expression(text, read, write, 0).value()


class _Expression:
    """A parser by precedence.

    Each part becomes a function, so that what `&&`, `||` or `?:` leave out is not computed.
    """

    def __init__(
        self, text: str, read: Callable[[str], str | None], write: Callable[[str, str], None], depth: int
    ) -> None:
        if depth > 20 or len(text) > 10_000:
            raise NotKnown(text)
        self.tokens, self.read, self.write, self.depth = [*_tokens(text)], read, write, depth

    def value(self) -> int:
        """Evaluate the whole text. An empty text is 0."""
        if not self.tokens:
            return 0
        try:
            thunk = self._list()
        except RecursionError:
            raise NotKnown("the expression is nested too deeply") from None
        if self.tokens:
            raise NotKnown(self.tokens[0])
        return thunk()

    def _next(self) -> str:
        return self.tokens[0] if self.tokens else ""

    def _take(self, *signs: str) -> str:
        """Consume and return the next token if it is one of these."""
        return self.tokens.pop(0) if self.tokens and self.tokens[0] in signs else ""

    def _need(self, sign: str) -> None:
        if not self._take(sign):
            raise NotKnown(f"{sign} is missing")

    def _list(self) -> Thunk:
        parts = [self._choice()]
        while self._take(","):
            parts.append(self._choice())
        return lambda: [part() for part in parts][-1]

    def _choice(self) -> Thunk:
        """Return an assignment, or A ? B : C."""
        if len(self.tokens) > 1 and _is_name(self.tokens[0]) and self.tokens[1] in _ASSIGNMENTS:
            name, sign = self.tokens.pop(0), self.tokens.pop(0)
            right = self._choice()
            return lambda: self._assigned(
                name, _BINARY[sign[:-1]](self._variable(name), right()) if sign != "=" else right()
            )
        test = self._binary(0)
        if not self._take("?"):
            return test
        first = self._list()
        self._need(":")
        second = self._choice()
        return lambda: first() if test() else second()

    def _binary(self, level: int) -> Thunk:
        if level == len(_LEVELS):
            return self._power()
        thunk = self._binary(level + 1)
        while sign := self._take(*_LEVELS[level]):
            thunk = self._joined(sign, thunk, self._binary(level + 1))
        return thunk

    def _joined(self, sign: str, left: Thunk, right: Thunk) -> Thunk:
        if sign == "&&":
            return lambda: int(bool(left() and right()))
        if sign == "||":
            return lambda: int(bool(left() or right()))
        return lambda: _checked(_BINARY[sign](left(), right()))

    def _power(self) -> Thunk:
        base = self._unary()
        return self._joined("**", base, self._power()) if self._take("**") else base

    def _unary(self) -> Thunk:
        if sign := self._take(*_UNARY):
            inner = self._unary()
            return lambda: _UNARY[sign](inner())
        if sign := self._take("++", "--"):
            name = self.tokens.pop(0) if _is_name(self._next()) else ""
            return lambda: self._stepped(name, sign, 1)
        return self._operand()

    def _operand(self) -> Thunk:
        if self._take("("):
            inner = self._list()
            self._need(")")
            return inner
        token = self.tokens.pop(0) if self.tokens else ""
        if token[:1].isdigit():
            number = _number(token)
            return lambda: number
        if not _is_name(token):
            raise NotKnown(token)
        if self._take("["):
            index = self._list()
            self._need("]")
            return lambda: self._variable(f"{token}[{index()}]")
        if sign := self._take("++", "--"):
            return lambda: self._stepped(token, sign, 0)
        return lambda: self._variable(token)

    def _variable(self, name: str) -> int:
        """Evaluate a variable, whose value is an expression too."""
        text = self.read(name)
        if text is None:
            raise NotKnown(name)
        return _Expression(text, self.read, self.write, self.depth + 1).value()

    def _assigned(self, name: str, value: int) -> int:
        self.write(name, str(_checked(value)))
        return value

    def _stepped(self, name: str, sign: str, after: int) -> int:
        """Increment or decrement a variable, and return the value before (after = 0) or after the step."""
        before = self._variable(name)
        step = 1 if sign == "++" else -1
        self._assigned(name, before + step)
        return before + after * step


def _tokens(text: str) -> list[str]:
    tokens, place = [], 0
    text = text.rstrip()
    while place < len(text):
        token = _TOKEN.match(text, place)
        if token is None:
            raise NotKnown(text)
        tokens.append(token[0].strip())
        place = token.end()
    return tokens


def _number(token: str) -> int:
    """Return a number: decimal, 0x… (16), 0… (8) or BASE#…"""
    base, sign, digits = token.partition("#")
    try:
        if sign:
            return int(digits, int(base))
        return int(token, 16 if token[:2] in ("0x", "0X") else 8 if token[0] == "0" else 10)
    except ValueError:
        raise NotKnown(token) from None


def _is_name(token: str) -> bool:
    return token[:1].isalpha() or token[:1] == "_"


def _checked(value: int) -> int:
    if abs(value) >= LARGEST:
        raise NotKnown("the number does not fit in 64 bits")
    return int(value)
