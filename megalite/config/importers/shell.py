"""The arguments of a command in a shell script, as far as simple substitution finds them. Nothing is executed, and this process's
environment is not read."""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable

from megalite.config.schema import ConfigError

_QUOTED = r"""(?:"(?:[^"\\]|\\.)*"|'[^']*')"""
_ARRAY = rf"""\((?:[^()'"]|{_QUOTED}|\$\([^)]*\))*\)"""
_TEXT = rf"""(?:{_QUOTED}|\$\(\([^)]*\)*\)\)|\$\([^)]*\)|[^\s;"'])*"""
_ASSIGNMENT = re.compile(
    rf"^[ \t]*(?:export[ \t]+|local[ \t]+|declare[ \t]+(?:-\w+[ \t]+)*)?(\w+)(\+?=)({_ARRAY}|{_TEXT})[ \t]*;?", re.MULTILINE
)
_VARIABLE = re.compile(r"\$\{(\w+)(?:\[[@*]\])?(?::?[-=]((?:[^{}]|\$\{\w+\})*))?\}|\$(\w+)")
_ARITHMETIC = re.compile(r"\$\(\(([^()$]*(?:\([^()$]*\)[^()$]*)*)\)\)")
_CONDITION = re.compile(r"(?:^|;)[ \t]*(if|case|for|while|until|fi|esac|done)\b", re.MULTILINE)
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv, ast.Mod: operator.mod}
}


def words(script: str) -> tuple[list[str], list[str]]:
    """The words of the last command that runs a Python file with options, and the variables that are also assigned under a condition.

    Variables are replaced by their last unconditional assignment, or their default (${A:-b}); what has neither stays as it is, with its $.
    Raises ConfigError if there is no such command.
    """
    text = re.sub(r"(^|[ \t])#.*$", r"\1", script, flags=re.MULTILINE).replace("\\\n", " ")
    text = re.sub(r'"(\$\{\w+\[[@*]\]\})"', r"\1", text)  # the words of an array, not one word
    text = re.sub(r";[ \t]+(?=(?:export[ \t]+)?\w+=)", "\n", text)
    conditional: list[str] = []
    variables: dict[str, str] = {}
    for found in _ASSIGNMENT.finditer(text):
        name, sign, value = found.groups()
        if _depth(text[: found.start()]):
            conditional.append(name)
        else:
            value = value[1:-1] if value[:1] in ("(", '"', "'") and value[-1:] in (")", '"', "'") else value
            value = expand(value, variables)
            variables[name] = f"{variables.get(name, '')} {value}" if sign == "+=" else value
    commands = [expand(line, variables) for line in _ASSIGNMENT.sub("", text).splitlines()]
    runs = [line for line in commands if re.search(r"\.py['\"]?\s.*--\w|^\s*--\w", line, re.DOTALL)]
    if not runs:
        raise ConfigError("the text has no command that runs a .py file with --options. Give the command, or the script that has it.")
    return split(runs[-1]), sorted({*conditional})


def _depth(text: str) -> int:
    """Number of conditions and loops that are open at the end of a text."""
    found = [word in ("fi", "esac", "done") for word in _CONDITION.findall(text)]
    return len(found) - 2 * sum(found)


def expand(text: str, variables: dict[str, str]) -> str:
    """A text with its variables and its arithmetic replaced."""

    def value(found: re.Match[str]) -> str:
        name, default = found[1] or found[3], found[2]
        given = variables.get(name, default)
        return found[0] if given is None else given.strip("\"'") if given is default else given

    for _ in range(20):  # a variable's value may have further variables
        replaced = _ARITHMETIC.sub(lambda found: _calculate(found, variables), _VARIABLE.sub(value, text))
        if replaced == text:
            break
        text = replaced
    return text


def _calculate(found: re.Match[str], variables: dict[str, str]) -> str:
    """The value of $((A * b)); the text itself if it is more than integer arithmetic."""

    def of(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp):
            return _OPERATORS[type(node.op)](of(node.left), of(node.right))
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name):
            return int(variables[node.id])
        raise ValueError

    try:
        return str(of(ast.parse(found[1].strip(), mode="eval").body))
    except (SyntaxError, ValueError, KeyError, ZeroDivisionError):
        return found[0]


def split(command: str) -> list[str]:
    """The words of a command; a quoted "--name value" is split again, as where an array is expanded without quotes."""
    try:
        found = shlex.split(command)
        return [part for word in found for part in (shlex.split(word) if re.match(r"--[\w-]+\s", word) else [word])]
    except ValueError as error:
        raise ConfigError(f"the command can not be read: {error}. Correct its quotes.") from None
