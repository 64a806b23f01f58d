"""Output of known programs, computed without running them.

The output for given words and input is None if it is unknown.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable

from megalite.importers.shell import arithmetic
from megalite.importers.shell.values import has_unknown

_ESCAPED = {"n": "\n", "t": "\t", "\\": "\\"}


def _unescape(text: str) -> str:
    return re.sub(r"\\([nt\\])", lambda match: _ESCAPED[match[1]], text)


def _echo(words: list[str], stdin: str | None) -> str:
    newline, escapes = "\n", False
    while words and re.fullmatch(r"-[neE]+", words[0]):
        newline = "" if "n" in words[0] else newline
        escapes = "e" in words[0] or escapes
        words = words[1:]
    text = " ".join(words)
    return (_unescape(text) if escapes else text) + newline


def formatted(words: list[str]) -> str | None:
    """Return the output of printf, which supports only %s and %d."""
    if not words:
        return None
    pattern, values = _unescape(words[0]), words[1:]
    holes = re.findall(r"%[^%]", pattern)
    if any(hole not in ("%s", "%d") for hole in holes):
        return None
    pieces = re.split(r"(%[^%])", pattern)
    result = ""
    while True:
        result += "".join(
            (values.pop(0) if values else "") if place % 2 else piece for place, piece in enumerate(pieces)
        ).replace("%%", "%")
        if not values or not holes:
            return result


def _sequence(words: list[str], stdin: str | None) -> str | None:
    separator = "\n"
    if words and words[0].startswith("-s"):
        separator, words = (
            (words[0][2:], words[1:]) if len(words[0]) > 2 else ("".join(words[1:2]), words[2:])
        )
    if not words or len(words) > 3 or not all(re.fullmatch(r"-?\d+", word) for word in words):
        return None
    numbers = [int(word) for word in words]
    first, step, last = (
        (1, 1, numbers[0])
        if len(numbers) == 1
        else (numbers[0], 1, numbers[1])
        if len(numbers) == 2
        else tuple(numbers)
    )
    if step == 0 or abs(last - first) // abs(step) > 10_000:
        return None
    return separator.join(map(str, range(first, last + (1 if step > 0 else -1), step))) + "\n"


def _expression(words: list[str], stdin: str | None) -> str | None:
    """Evaluate expr A \\* B, or bc on an integer expression."""
    text = " ".join(words) if words else (stdin or "")
    if has_unknown(text) or re.search(r"[^\d\s()+*/%<>=!&|^-]", text):
        return None

    def read(name: str) -> str | None:
        return None

    try:
        return f"{arithmetic.calculate(text.replace('^', '**'), read, lambda name, value: None)}\n"
    except arithmetic.NotKnown:
        return None


def _calculator(words: list[str], stdin: str | None) -> str | None:
    options = [word for word in words if word.startswith("-")]
    return _expression([], stdin) if stdin and len(options) == len(words) and "-l" not in options else None


def _base_name(words: list[str], stdin: str | None) -> str | None:
    words = [word for word in words if word != "--"]
    if not words or has_unknown(words[0].rstrip("/").rsplit("/", 1)[-1]):
        return None
    name = posixpath.basename(words[0].rstrip("/"))
    return (name.removesuffix(words[1]) if len(words) > 1 and name != words[1] else name) + "\n"


def _directory(words: list[str], stdin: str | None) -> str | None:
    words = [word for word in words if word != "--"]
    return (
        f"{posixpath.dirname(words[0].rstrip('/')) or '.'}\n"
        if len(words) == 1 and "/" in words[0] + "/"
        else None
    )


def _same(words: list[str], stdin: str | None) -> str | None:
    return stdin if not [word for word in words if word != "-"] else None


def _translated(words: list[str], stdin: str | None) -> str | None:
    if (
        stdin is None
        or has_unknown(stdin)
        or any(len(word) > 1 and word not in ("-d", "\\n") for word in words)
    ):
        return None
    if len(words) == 2 and words[0] == "-d":
        return stdin.replace(_unescape(words[1]), "")
    return stdin.replace(_unescape(words[0]), _unescape(words[1])) if len(words) == 2 else None


PROGRAMS: dict[str, Callable[[list[str], str | None], str | None]] = {
    "echo": _echo,
    "printf": lambda words, stdin: formatted([word for word in words if word != "--"]),
    "seq": _sequence,
    "expr": _expression,
    "bc": _calculator,
    "basename": _base_name,
    "dirname": _directory,
    "cat": _same,
    "tee": lambda words, stdin: stdin,
    "tr": _translated,
    "xargs": lambda words, stdin: None if stdin is None or words else " ".join(stdin.split()) + "\n",
}
