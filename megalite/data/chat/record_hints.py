"""Hints for records that cannot be read: their probable format and the options that read it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

TEXT_KEY = "text"
"""The usual key of a text, also used for records that are strings, as in Hugging Face's `datasets`."""
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}
ROLES |= dict.fromkeys(("observation", "function_response", "function"), "tool")
"""Role names of ShareGPT and of OpenAI's earlier format that differ from those of chat templates."""
KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool")
QUESTIONS = ("instruction", "question", "query", "prompt", "input", "inputs", "problem", "user")
ANSWERS = ("output", "answer", "response", "completion", "target", "targets", "solution", "assistant")
"""Names that data sets give to questions and answers."""
PREFERRED = {
    "chosen": ("chosen_response", "accepted", "preferred"),
    "rejected": ("rejected_response", "dispreferred"),
    "label": ("is_good", "desirable", "is_chosen"),
}
"""Our names of the keys of preferences → names in data sets."""
NOT_TEXT = re.compile(
    r"[\W\d_]*|[+-]?[\d.,]*(?:e[+-]?\d+|nan|inf)|\d{4}-\d\d-\d\dT\S*|\w+://\S+|[\da-f-]{16,}", re.IGNORECASE
)
"""Numbers, times, addresses and hashes, which are strings in a .csv."""
Record = Mapping[str, Any]


def for_texts(record: Record) -> str:
    """Return a hint for a record without the requested text, or an empty string.

    Args:
        record: a record, or None for each of its keys if only these are known.
    """
    if preferred := _preference(record, "--chat "):
        return preferred
    if options := _conversation(record):
        return f"The records look like conversations: add {options}."
    if TEXT_KEY not in record and (key := _text_key(record)):
        return f"The records seem to have their text in {key}: add --text_key {key}."
    return ""


def for_chats(record: Record) -> str:
    """Return a hint for a record that is not a conversation, or an empty string."""
    if preferred := _preference(record, ""):
        return preferred
    if options := _conversation(record).removeprefix("--chat").strip():
        return f"The records look like conversations with different key names: add {options}."
    if key := _text_key(record):
        return (
            "The records look like plain text: remove "
            f"--chat{'' if key == TEXT_KEY else f' and add --text_key {key}'}."
        )
    return ""


def _conversation(record: Record) -> str:
    """Return the options that read the record as a conversation, or an empty string."""
    forms = ({"messages"}, {"conversations"}, {"prompt", "completion"}, {"instruction", "output"})
    if any(form <= record.keys() for form in forms):
        return "--chat"
    for key, value in record.items():
        if (names := _names_of_messages(value)) is not None:
            return f"--chat --keys {','.join([f'messages={key}', *names])}"
    question = next((key for key in QUESTIONS if _is_text(record, key)), None)
    answer = next((key for key in ANSWERS if _is_text(record, key)), None)
    if question is None or answer is None:
        return ""
    names = [
        f"{ours}={theirs}"
        for ours, theirs in (("instruction", question), ("output", answer))
        if ours != theirs
    ]
    return f"--chat --keys {','.join(names)}"


def _names_in_message(turn: Record) -> list[str] | None:
    """Return the names of role and content in a message as arguments of --keys, or None if it is not a
    message.

    Names that are known are left out.
    """
    role = next(
        (key for key, value in turn.items() if isinstance(value, str) and value in (*KNOWN_ROLES, *ROLES)),
        None,
    )
    texts = {key: value for key, value in turn.items() if key != role and value and _is_text(turn, key)}
    # a message may be a number
    content = _text_key(texts) or max(texts, key=lambda key: len(texts[key]), default="")
    if role is None or not content:
        return None
    ours = ("from", "value") if role == "from" else ("role", "content")
    return [f"{our}={their}" for our, their in zip(ours, (role, content), strict=True) if our != their]


def for_preferences(record: Record) -> str:
    """Return a hint for a record that is not a preference, or an empty string."""
    names = []
    for ours, known in PREFERRED.items():
        if ours not in record and (key := next((name for name in known if name in record), None)):
            names.append(f"{ours}={key}")
    if not names:
        return ""
    return f"The records look like preferences with different key names: add --keys {','.join(names)}."


def for_prompts(record: Record, shared: str, read: Sequence[str]) -> tuple[list[str], str]:
    """Find what a pair of completions without a prompt may have as its prompt.

    Args:
        shared: the text that both completions begin with.
        read: keys whose values are no prompt.

    Returns:
        Keys with texts or messages that are not read, and the option that reads one of them, or "". With a
        shared text these are only keys with the name of a question and a sentence that is not in the text.
    """
    unread = [
        key
        for key, value in record.items()
        if key not in read and isinstance(value, str) and not NOT_TEXT.fullmatch(value.strip())
    ]
    if shared:
        named = [key for key in unread if key in (*QUESTIONS, "system") and " " in record[key].strip()]
        unread = [key for key in named if record[key].strip() not in shared]
    else:
        unread += [key for key in record if key not in read and _names_of_messages(record[key]) is not None]
    messages = next((key for key in unread if not _is_text(record, key)), None)
    if messages is not None:
        names = [f"messages={messages}", *(_names_of_messages(record[messages]) or [])]
        return unread, f"--keys {','.join(names)}"
    questions = [key for key in unread if key != "system"]
    longest = max(questions, key=lambda key: len(record[key]), default="")
    question = next((key for key in QUESTIONS if key in questions), longest)
    return unread, f"--keys instruction={question}" if question else ""


def _names_of_messages(value: Any) -> list[str] | None:
    """Return `_names_in_message` of the first of a list of messages, or None for another value."""
    if not isinstance(value, list) or not value or not isinstance(value[0], dict):
        return None
    return _names_in_message(value[0])


def _preference(record: Record, chat: str) -> str:
    """Return a hint for a pair of a chosen and a rejected answer, or an empty string."""
    if not {"chosen", "rejected"} <= record.keys():
        return ""
    if isinstance(record["chosen"], str) and "prompt" not in record:
        options = "--text_key chosen" if chat else "--text_key chosen instead of --chat"
    elif type(record["chosen"]) is type(record.get("prompt")):
        options = f"{chat}--keys completion=chosen"
    else:
        options = f"{chat}--keys messages=chosen"
    instead = "" if chat else " instead of --chat"
    return (
        f"The records are preference pairs: add --preference{instead}, or, to train on the chosen answers "
        f"only, add {options}."
    )


def _text_key(record: Record) -> str:
    """Return the key with the longest text, or an empty string if no value is a text."""
    texts = {
        key: value
        for key, value in record.items()
        if isinstance(value, str) and not NOT_TEXT.fullmatch(value)
    }
    return (
        TEXT_KEY
        if record.get(TEXT_KEY) and _is_text(record, TEXT_KEY)
        else max(texts, key=lambda key: len(texts[key]), default="")
    )


def _is_text(record: Record, key: str) -> bool:
    return isinstance(record.get(key), str)
