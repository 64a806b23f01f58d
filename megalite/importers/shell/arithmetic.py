"""The integer arithmetic of $((…)), ((…)), let and expr."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.LShift: operator.lshift, ast.RShift: operator.rshift},
    **{ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.BitXor: operator.xor},
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    **{ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge}
}
_ASSIGNMENT = re.compile(r"\s*([A-Za-z_]\w*)\s*(\*\*|[-+*/%]|<<|>>)?=(?!=)(.*)", re.DOTALL)
_STEP = re.compile(r"\s*(?:(\+\+|--)\s*([A-Za-z_]\w*)|([A-Za-z_]\w*)\s*(\+\+|--))\s*")
LARGEST = 1 << 63


class NotKnown(ValueError):
    """The expression has a part without a known value, or is more than integer arithmetic."""


def calculate(text: str, read: Callable[[str], str | None], write: Callable[[str, str], None]) -> int:
    """The value of an expression; its assignments are written. read: a variable's text, None if it is not known. Raises NotKnown."""
    parts = text.split(",") if "(" not in text else [text]
    value = 0
    for part in parts:
        value = _statement(part, read, write)
    return value


def _statement(text: str, read: Callable[[str], str | None], write: Callable[[str, str], None]) -> int:
    if step := _STEP.fullmatch(text):
        name, sign = step[2] or step[3], step[1] or step[4]
        before = _value(name, read, 0)
        after = before + (1 if sign == "++" else -1)
        write(name, str(after))
        return after if step[1] else before
    if found := _ASSIGNMENT.fullmatch(text):
        name, sign, rest = found.groups()
        value = _value(f"({name}) {sign} ({rest})" if sign else rest, read, 0)
        write(name, str(value))
        return value
    return _value(text, read, 0)


def _value(text: str, read: Callable[[str], str | None], depth: int) -> int:
    """The value of an expression without assignments; the value of a variable is an expression, too."""
    text = text.strip()
    if not text:
        return 0
    if depth > 20 or len(text) > 10_000:
        raise NotKnown(text)
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    python = re.sub(r"(?<![=!<>])!(?!=)", " not ", text.replace("&&", " and ").replace("||", " or "))
    if choice := re.fullmatch(r"([^?]+)\?([^:]+):(.+)", python):
        python = f"({choice[2]}) if ({choice[1]}) else ({choice[3]})"
    python = re.sub(r"\b0+(?=[1-9])", "", python)
    try:
        return _node(ast.parse(python.strip(), mode="eval").body, read, depth)
    except (SyntaxError, RecursionError, MemoryError, ValueError):
        raise NotKnown(text) from None


def _node(node: ast.expr, read: Callable[[str], str | None], depth: int) -> int:
    def of(inner: ast.expr) -> int:
        return _node(inner, read, depth)

    match node:
        case ast.Constant(value=int(number)):
            return int(number)
        case ast.Name():
            found = read(node.id)
            if found is None:
                raise NotKnown(node.id)
            return _value(found, read, depth + 1)
        case ast.BinOp():
            return _binary(node.op, of(node.left), of(node.right))
        case ast.UnaryOp():
            return _unary(node.op, of(node.operand))
        case ast.IfExp():
            return of(node.body) if of(node.test) else of(node.orelse)
    return int(_truth(node, of))


def _truth(node: ast.expr, of: Callable[[ast.expr], int]) -> bool:
    match node:
        case ast.BoolOp():
            truths = (of(each) for each in node.values)
            return all(truths) if isinstance(node.op, ast.And) else any(truths)
        case ast.Compare(ops=[op], comparators=[right]) if type(op) in _COMPARISONS:
            return _COMPARISONS[type(op)](of(node.left), of(right))
    raise NotKnown(ast.dump(node))


def _unary(op: ast.unaryop, value: int) -> int:
    if isinstance(op, ast.Not):
        return int(not value)
    return -value if isinstance(op, ast.USub) else ~value if isinstance(op, ast.Invert) else value


def _binary(op: ast.operator, left: int, right: int) -> int:
    if isinstance(op, (ast.Div, ast.FloorDiv, ast.Mod)):
        if right == 0:
            raise NotKnown("division by zero")
        whole = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
        return left - whole * right if isinstance(op, ast.Mod) else whole
    if isinstance(op, (ast.Pow, ast.LShift, ast.RShift)) and not 0 <= right < 64:
        raise NotKnown("an exponent out of range")
    if isinstance(op, ast.Pow):
        value = left**right
    elif type(op) in _OPERATORS:
        value = _OPERATORS[type(op)](left, right)
    else:
        raise NotKnown(ast.dump(op))
    if abs(value) >= LARGEST:
        raise NotKnown("a number of more than 64 bits")
    return value
