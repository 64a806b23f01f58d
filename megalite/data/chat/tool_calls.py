"""Parsing of tools and tool calls in chat records from JSON text to objects.

OpenAI's `function.arguments` is always JSON text, and data sets often store `tools` and `parameters` as text,
since their values have no common schema. A template that writes `arguments | tojson` would quote such text a
second time. A null in JSON text is kept.
"""

from __future__ import annotations

import json
from typing import Any

from megalite.data.indexed import DataError

Fields = dict[str, Any]


class BadTools(DataError):
    """Raised for tools or tool calls that cannot be parsed, with the problem and a way out."""

    def __init__(self, problem: str, way_out: str):
        super().__init__(problem, way_out)
        self.problem, self.way_out = problem, way_out


def tools_of(record: Fields) -> list[Fields] | None:
    """Return the `tools` of a record as objects, or None.

    OpenAI's earlier format has `functions` instead. Raises BadTools.
    """
    tools = _list(without_nulls(record.get("tools")), "tools", "tool")
    if (
        tools is None
        and (functions := _list(without_nulls(record.get("functions")), "functions", "function")) is not None
    ):
        tools = [{"type": "function", "function": function} for function in functions]
    if tools is None:
        return None
    return [
        _with_object(_with_function(tool, f"tool {number}"), "parameters", f"tool {number}")
        for number, tool in enumerate(tools, 1)
    ]


def calls_of(message: Fields) -> list[Fields] | None:
    """Return the `tool_calls` of a message as objects, or None.

    OpenAI's earlier format has `function_call` instead.

    Raises BadTools.
    """
    calls = _list(without_nulls(message.get("tool_calls")), "tool_calls", "call")
    if not calls and (function := without_nulls(message.get("function_call"))) is not None:
        calls = [{"type": "function", "function": _decoded(function, "function_call", dict)}]
    if calls is None:
        return None
    return [
        _with_object(_with_function(call, f"call {number}"), "arguments", f"call {number}")
        for number, call in enumerate(calls, 1)
    ]


def _list(value: Any, name: str, item: str) -> list[Fields] | None:
    """Return a list of objects, parsing JSON text of the list or its items.

    None and an empty text result in None.
    """
    if value is None or value == "":
        return None
    return [
        _decoded(each, f"{item} {number} of {name}", dict)
        for number, each in enumerate(_decoded(value, name, list), 1)
    ]


def _with_function(item: Fields, what: str) -> Fields:
    """Return a tool or call with its `function` parsed.

    In tools without `function`, its keys are at the top level.
    """
    if item.get("function") is None:
        return item
    return {**item, "function": _decoded(item["function"], f"function of {what}", dict)}


def _with_object(item: Fields, key: str, what: str) -> Fields:
    """Return a tool or call with a key of its function parsed."""
    if isinstance(function := item.get("function"), dict):
        return {**item, "function": _with_object(function, key, what)}
    if item.get(key) is None:
        return item
    name = f" ({item['name']})" if isinstance(item.get("name"), str) else ""
    return {**item, key: _decoded(item[key], f"{key} of {what}{name}", dict)}


def _decoded(value: Any, what: str, kind: type) -> Any:
    """Return a value of type `kind`, parsing JSON text. Raises BadTools for other types."""
    wanted = "a list" if kind is list else "an object"
    way_out = f"Expected {wanted} or a JSON string."
    decoded = value
    if isinstance(value, str):
        try:
            decoded = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise BadTools(f"{what} is not valid JSON ({error}).", way_out) from None
    if not isinstance(decoded, kind):
        read = " in JSON" if decoded is not value else ""
        raise BadTools(f"{what} must be {wanted}, got {type(decoded).__name__}{read}.", way_out)
    return decoded


def without_nulls(value: Any) -> Any:
    """Remove None values from objects.

    Tables fill in None for each key that only other rows have.
    """
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value
