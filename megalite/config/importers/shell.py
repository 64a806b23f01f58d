"""The arguments of a command in a shell script, as far as simple substitution finds them. Nothing is executed, and this process's
environment is not read."""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Collection, Iterator

from megalite.config.schema import ConfigError

_QUOTED = r"""(?:"(?:[^"\\]|\\.)*"|'[^']*')"""
_ARRAY = rf"""\((?:[^()'"]|{_QUOTED}|\$\([^)]*\))*\)"""
_TEXT = rf"""(?:{_QUOTED}|\$\(\([^)]*\)*\)\)|\$\([^)]*\)|[^\s;"'])*"""
_DECLARED = r"(?:export[ \t]+|local[ \t]+|readonly[ \t]+|declare[ \t]+(?:-\w+[ \t]+)*)?"
_ASSIGNMENT = re.compile(rf"^[ \t]*{_DECLARED}(\w+)(\+?=)({_ARRAY}|{_TEXT})[ \t]*;?", re.MULTILINE)
_WITHIN_A_LINE = re.compile(rf"""{_QUOTED}|(;|&&|\|\||\b(?:then|else|do)(?=\s)|(?<=[\w*"'|])\)(?=[ \t]))[ \t]*(?={_DECLARED}\w+\+?=)""")
"""Quoted text; what comes before an assignment that does not begin a line."""
_CHAIN = re.compile(r"(?:[^\n;]*(?:&&|\|\|)[ \t]*\n)+\s*\Z")
_ALWAYS = re.compile(rf"\s*(?:{_DECLARED}\w+\+?=|(?:cd|mkdir|source|\.|module|echo)\s)")
"""The beginning of a command that is expected to succeed, so that what follows its && is no condition."""
_VARIABLE = re.compile(r"\$\{(\w+)(?:\[[@*]\])?(?::?[-=]((?:[^{}]|\$\{\w+\})*))?\}|\$(\w+)")
_ARITHMETIC = re.compile(r"\$\(\(([^()$]*(?:\([^()$]*\)[^()$]*)*)\)\)")
_CONDITION = re.compile(r"(?:^|;)[ \t]*(if|case|for|while|until|fi|esac|done)\b", re.MULTILINE)
_SYNTAX = re.compile(
    rf"""{_QUOTED}|\\.|\$\(\([^)]*\)*\)\)|\$\([^)]*\)|`[^`]*`|<[\w ./-]*>(?!\S)"""
    r"""|(?P<redirected>(?:(?<=\s)\d|&)?(?:>>|<{1,3}|>)&?\s*(?:[<>]\([^)]*\)|[^\s;|&<>]+))|(?P<end>[;|&]+)"""
)
"""Quoted text, substitutions and <placeholders>, which are of a word; redirections; and what ends a command."""
_RUN = re.compile(r"\.py['\"]?\s.*--\w|^\s*--\w", re.DOTALL)
LONGEST = 1_000_000
"""Limit of the length of a text whose variables are replaced, which is not that of any command."""
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv, ast.Mod: operator.mod}
}


def words(script: str, marks: Collection[str] = ()) -> tuple[list[str], list[str]]:
    """The words of the command that runs a Python file with options, and the variables that are also assigned under a condition.

    Of several such commands it is the one with the most options among `marks`, and of those the last. Variables are replaced by their last
    unconditional assignment, or their default (${A:-b}); what has neither stays as it is, with its $. Redirections are left out.
    Raises ConfigError if there is no such command.
    """
    text = re.sub(r"(^|[ \t])#.*$", r"\1", script, flags=re.MULTILINE).replace("\\\n", " ")
    text = re.sub(r'"(\$\{\w+\[[@*]\]\})"', r"\1", text)  # the words of an array, not one word
    text = _WITHIN_A_LINE.sub(_line, text)
    conditional: list[str] = []
    variables: dict[str, str] = {}
    for found in _ASSIGNMENT.finditer(text):
        name, sign, value = found.groups()
        if _is_conditional(text[: found.start()]):
            conditional.append(name)
        else:
            value = value[1:-1] if value[:1] in ("(", '"', "'") and value[-1:] in (")", '"', "'") else value
            value = expand(value, variables)
            variables[name] = f"{variables.get(name, '')} {value}" if sign == "+=" else value
    runs = [line for line in _commands(_ASSIGNMENT.sub("", text), variables) if _RUN.search(line)]
    if not runs:
        raise ConfigError("the text has no command that runs a .py file with --options. Give the command, or the script that has it.")
    best = max(reversed(runs), key=lambda line: sum(f"--{mark}" in line.replace("_", "-") for mark in marks))
    return split(best), sorted({*conditional})


def _line(found: re.Match[str]) -> str:
    """What comes before an assignment, with the assignment on a line of its own."""
    return found[0] if found[1] is None else "\n" if found[1] == ";" else f"{found[1]}\n"


def _is_conditional(before: str) -> bool:
    """Whether an assignment after this text is under a condition or in a loop, or the second part of an && or ||."""
    found = [word in ("fi", "esac", "done") for word in _CONDITION.findall(before)]
    if len(found) - 2 * sum(found):
        return True
    chain = _CHAIN.search(before) if before.rstrip().endswith(("&&", "||")) else None
    return chain is not None and ("||" in chain[0] or not all(map(_ALWAYS.match, chain[0].split("&&")[:-1])))


def _commands(text: str, variables: dict[str, str]) -> Iterator[str]:
    """The commands of a script with their variables replaced. The text of a variable has commands only where eval runs it."""
    for line in text.splitlines():
        for command in _cut(line):
            whole = expand(command, variables)
            yield from _cut(whole) if command.lstrip().startswith("eval ") else [whole]


def _cut(line: str) -> list[str]:
    """The commands of a line, without their redirections."""

    def kept(found: re.Match[str]) -> str:
        return "\0" if found["end"] else "" if found["redirected"] else found[0]

    return _SYNTAX.sub(kept, line).split("\0")


def expand(text: str, variables: dict[str, str]) -> str:
    """A text with its variables and its arithmetic replaced."""

    def value(found: re.Match[str]) -> str:
        name, default = found[1] or found[3], found[2]
        given = variables.get(name, default)
        return found[0] if given is None else given.strip("\"'") if given is default else given

    for _ in range(20):  # a variable's value may have further variables
        if len(text) + sum(len(value(found)) for found in _VARIABLE.finditer(text)) > LONGEST:
            found = f"{text[:40].strip()} … has over {LONGEST} characters where its variables are replaced"
            raise ConfigError(f"the script can not be read: {found}. Give the command alone.")
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
