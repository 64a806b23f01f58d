"""Text that has an encoding: JSON can spell lone surrogates, and so can the words of a command line, but no
encoding has them.

Everywhere a lone surrogate is replaced by U+FFFD, as a byte that is not UTF-8 is.
"""

from __future__ import annotations

import json
from typing import Any


def whole(text: str) -> tuple[str, bool]:
    """The text and False; or, if it has lone surrogates, the text with U+FFFD in place of each and True."""
    try:
        text.encode()
        return text, False
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"), True


def parsed(text: str) -> tuple[Any, bool]:
    """A JSON value, and whether a text in it, however deep, had lone surrogates, which are replaced as in
    `whole`.

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
