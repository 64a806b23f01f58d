"""Replacement of lone surrogates, which JSON and command lines can contain but UTF-8 cannot encode.

A lone surrogate is replaced by U+FFFD, like a byte that is not valid UTF-8.
"""

from __future__ import annotations

import json
from typing import Any


def whole(text: str) -> tuple[str, bool]:
    """Replace lone surrogates by U+FFFD, and return the text and whether it had any."""
    try:
        text.encode()
        return text, False
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"), True


def parsed(text: str) -> tuple[Any, bool]:
    """Parse JSON, and return the value and whether a string in it had lone surrogates.

    They are replaced as in `whole`.

    Raises ValueError if the text is not JSON, RecursionError if it is nested too deeply.
    """
    value = json.loads(text)
    escaped = "\\ud" in text or "\\uD" in text  # nothing else makes one: a text that was decoded has none
    return _whole_values(value) if escaped else (value, False)


def _whole_values(value: Any) -> tuple[Any, bool]:
    if isinstance(value, str):
        return whole(value)
    if isinstance(value, list):
        items = [_whole_values(item) for item in value]
        return [item for item, _ in items], any(replaced for _, replaced in items)
    if isinstance(value, dict):
        pairs = [(_whole_values(key), _whole_values(item)) for key, item in value.items()]
        return {key: item for (key, _), (item, _) in pairs}, any(key or item for (_, key), (_, item) in pairs)
    return value, False
