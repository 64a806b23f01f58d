"""Formats of chat data: OpenAI's messages, Alpaca's instructions, ShareGPT's conversations. A record's keys determine its format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megalite.data.indexed import DataError

FORMS = (
    'messages ({"messages": [{"role": …, "content": …}, …]}), alpaca ({"instruction": …, "input": …, "output": …}) or sharegpt '
    '({"conversations": [{"from": …, "value": …}, …]})'
)
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "observation": "tool", "function_response": "tool"}
"""ShareGPT's role names that differ from those of chat templates."""
KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Conversation:
    """Messages as chat templates expect them, each with `role` and `content`; the format of the record, and its tools."""

    form: str
    messages: list[dict[str, Any]]
    tools: Any = None


def conversation_of(record: Any, where: str) -> Conversation:
    """The conversation in a record. Raises DataError with `where` and the reason if the record is not a conversation."""
    if not isinstance(record, dict):
        raise DataError(f"{where} is a {type(record).__name__}, not an object. A conversation is one of {FORMS}.")
    for key in ("messages", "conversations"):
        if record.get(key) is not None:
            return _listed(record, key, where)
    if "instruction" in record and "output" in record:
        return Conversation("alpaca", _from_alpaca(record, where))
    raise DataError(f"{where} holds no conversation: its keys are {', '.join(map(str, record)) or 'none'}. Give one of {FORMS}.")


def _listed(record: dict[str, Any], key: str, where: str) -> Conversation:
    turns = record[key]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
        raise DataError(f"{where}: {key} is not a list of messages. Give one of {FORMS}.")
    form = "sharegpt" if "from" in turns[0] else "messages"
    who, what = ("from", "value") if form == "sharegpt" else ("role", "content")
    messages = []
    for number, turn in enumerate(turns, 1):
        role, content = turn.get(who), turn.get(what)
        if content is None and turn.get("tool_calls"):
            content = ""
        if not isinstance(role, str) or not isinstance(content, str):
            raise DataError(f"{where}: message {number} of {key} has no text under {who} and {what}. Give one of {FORMS}.")
        if (role := ROLES.get(role, role)) not in KNOWN_ROLES:
            raise DataError(f"{where}: message {number} of {key} is by {turn[who]}. Known roles: {', '.join((*KNOWN_ROLES, *ROLES))}.")
        others = {name: value for name, value in turn.items() if name not in (who, what)}
        messages.append({"role": role, "content": content, **others})
    return Conversation(form, messages, record.get("tools"))


def _from_alpaca(record: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """The `system` text, if any; the instruction followed by the input, as the user's message; then the output."""
    texts = {key: record.get(key) or "" for key in ("system", "instruction", "input", "output")}
    for key, value in texts.items():
        if not isinstance(value, str):
            raise DataError(f"{where}: {key} is of type {type(value).__name__}, not text. Give one of {FORMS}.")
    asked = "\n\n".join(text for text in (texts["instruction"], texts["input"]) if text)
    system = [{"role": "system", "content": texts["system"]}] if texts["system"] else []
    return [*system, {"role": "user", "content": asked}, {"role": "assistant", "content": texts["output"]}]
