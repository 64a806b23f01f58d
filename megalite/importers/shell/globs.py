"""The patterns of case, [[ == ]] and ${NAME#…} as regular expressions: bash's globs, with extglob's lists."""

from __future__ import annotations

import re

_PART = re.compile(
    r"\\(?P<quoted>.)|(?P<list>[?*+@])\(|(?P<none>!)\(|(?P<set>\[(?P<not>[!^]?)(?P<in>\]?(?:\[:\w+:\]|\\.|[^\]\\])*)\])|(?P<other>.)",
    re.DOTALL,
)
_CLASSES = {
    "alpha": "A-Za-z",
    "digit": "0-9",
    "alnum": "A-Za-z0-9",
    "upper": "A-Z",
    "lower": "a-z",
    "space": r"\s",
    "xdigit": "0-9A-Fa-f",
}
_WILD = {"*": ".*", "?": "."}
_MANY = {"@": "", "?": "?", "*": "*", "+": "+"}


def quoted(text: str) -> str:
    """Return a text as a pattern that matches it alone."""
    return re.sub(r"([][\\*?+@!()|^#%])", r"\\\1", text)


def regular(pattern: str) -> re.Pattern[str]:
    """Convert a pattern to a regular expression for `fullmatch`, or for a search anywhere in a text.

    A backslash quotes the next character.
    """
    result: list[str] = []
    lists: list[str] = []
    for part in _PART.finditer(pattern):
        if part["list"] or part["none"]:
            lists.append(f"){_MANY[part['list']]}" if part["list"] else r")\Z).*")
            result.append("(?:" if part["list"] else "(?!(?:")
        elif lists and part["other"] in ("|", ")"):
            result.append("|" if part["other"] == "|" else lists.pop())
        elif part["set"]:
            result.append(_characters(part["in"], bool(part["not"])))
        else:
            result.append(_WILD.get(part["other"] or "", "") or re.escape(part["quoted"] or part["other"]))
    try:
        return re.compile("".join(result), re.DOTALL)
    except re.error:
        return re.compile(re.escape(pattern))


def with_classes(text: str) -> str:
    """Convert classes such as [:digit:] in a regular expression of bash to ranges."""
    return re.sub(r"\[:(\w+):\]", lambda match: _CLASSES.get(match[1], ""), text)


def _characters(inner: str, negative: bool) -> str:
    """Return a set such as [^a-z_] or [[:digit:]]."""
    escaped = re.sub(r"(?<!\\)([\[\]&~|])", r"\\\1", with_classes(inner))
    return f"[{'^' if negative else ''}{escaped}]"
