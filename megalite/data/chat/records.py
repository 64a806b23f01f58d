"""Formats of chat data: OpenAI's messages, ShareGPT's conversations, Alpaca's instructions, TRL's prompts
with completions.

A record's keys determine its format. `RecordReader` can map other keys to these, and reads contents that are
lists of text parts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from megalite.data.chat.record_hints import KNOWN_ROLES, ROLES, for_chats
from megalite.data.chat.tool_calls import BadTools, calls_of, tools_of, without_nulls
from megalite.data.indexed import DataError

FORMS = (
    'messages ({"messages": [{"role": …, "content": …}, …]}), sharegpt ({"conversations": [{"from": …, '
    '"value": …}, …]}), alpaca '
    '({"instruction": …, "input": …, "output": …}) or prompt-completion ({"prompt": …, "completion": …}, '
    "both texts or both messages)"
)
WAY_OUT = f"Give one of {FORMS}, or say with --keys what its keys mean."
KEYS_OF_RECORDS = (
    "messages",
    "conversations",
    "tools",
    "functions",
    "prompt",
    "completion",
    "system",
    "instruction",
    "input",
    "output",
)
KEYS_OF_MESSAGES = ("role", "content", "from", "value", "weight", "tool_calls", "function_call", "name")


class BadRecord(DataError):
    """A record that cannot be used: its place, which is formatted only when it is shown, what is wrong with
    it, and a way out."""

    def __init__(self, where: object, problem: str, way_out: str = ""):
        super().__init__(where, problem, way_out)
        self.where, self.problem, self.way_out = where, problem, way_out

    @property
    def reason(self) -> str:
        """The place and the problem."""
        return f"{self.where}{self.problem}"

    def __str__(self) -> str:
        return f"{self.reason} {self.way_out}".rstrip()


@dataclass(frozen=True)
class MessageAt:
    """The place of a message: `number` of the list `key` of a record."""

    where: object
    number: int
    key: str

    def __str__(self) -> str:
        return f"{self.where}: message {self.number} of {self.key}"


@dataclass(frozen=True)
class Conversation:
    """Messages as chat templates expect them, each with `role` and `content`.

    Attributes:
        form: the format of the record.
        tools: the record's tools as objects.
        prompt: number of messages at the beginning that belong to the prompt, whose turns have no loss.
        unweighted: numbers of the assistant's messages with weight 0.
    """

    form: str
    messages: list[dict[str, Any]]
    tools: Any = None
    prompt: int = 0
    unweighted: frozenset[int] = frozenset()


@dataclass(frozen=True)
class PromptCompletion:
    """A text and its continuation; the loss is computed on the continuation."""

    prompt: str
    completion: str
    form: str = "prompt-completion"


@dataclass(frozen=True)
class RecordReader:
    """Reads conversations from records.

    Attributes:
        keys: (ours, theirs): names of keys in the records where they are not the formats' own.
        drop_other_parts: drop the parts of a content that are not text; otherwise they are errors.
    """

    keys: tuple[tuple[str, str], ...] = ()
    drop_other_parts: bool = False

    def read(self, record: Any, where: object) -> Conversation | PromptCompletion:
        """The conversation in a record. Raises BadRecord with `where` and the reason if the record is not a
        conversation."""
        if not isinstance(record, dict):
            raise BadRecord(
                where, f" is a {type(record).__name__}, not an object.", f"A conversation is one of {FORMS}."
            )
        record = self._renamed(record, KEYS_OF_RECORDS)
        for key in ("messages", "conversations"):
            if record.get(key):
                read = self._messages(record[key], key, where)
                first = _system(record, read, where)
                unweighted = frozenset(len(first) + number for number in read.unweighted)
                return Conversation(
                    read.form, first + read.messages, _tools(record, where), unweighted=unweighted
                )
        if record.get("prompt") is not None and record.get("completion") is not None:
            return self._from_pair(record, where)
        if "instruction" in record and "output" in record:
            return Conversation("alpaca", _from_alpaca(record, where))
        for key in ("messages", "conversations"):
            if record.get(key) is not None:
                self._messages(record[key], key, where)  # says what is wrong with it
        keys = ", ".join(map(str, record)) or "none"
        raise BadRecord(where, f" holds no conversation: its keys are {keys}.", for_chats(record) or WAY_OUT)

    def _renamed(self, item: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
        mapped = {theirs: ours for ours, theirs in self.keys if ours in names and theirs in item}
        kept = {key: value for key, value in item.items() if key not in mapped and key not in mapped.values()}
        return {ours: item[theirs] for theirs, ours in mapped.items()} | kept if mapped else item

    def _from_pair(self, record: dict[str, Any], where: object) -> Conversation | PromptCompletion:
        """Two texts are a PromptCompletion; two lists of messages are one conversation.

        The loss is computed on the completion.
        """
        if record.get("label") is False:  # TRL's unpaired preferences
            raise BadRecord(
                where,
                " has label false: its completion is one to avoid.",
                "Remove such records: the loss is computed on every completion.",
            )
        prompt, completion = record["prompt"], record["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            if not prompt and not completion:
                raise BadRecord(where, ": prompt and completion are empty.", "Remove the record.")
            return PromptCompletion(prompt, completion)
        if not isinstance(prompt, list) or not isinstance(completion, list):
            kinds = f"{type(prompt).__name__} and {type(completion).__name__}"
            raise BadRecord(
                where,
                f": prompt and completion are of types {kinds}, not both texts or both messages.",
                WAY_OUT,
            )
        read = [self._messages(record[key], key, where) for key in ("prompt", "completion")]
        first, messages = len(read[0].messages), read[0].messages + read[1].messages
        unweighted = read[0].unweighted | {first + number for number in read[1].unweighted}
        return Conversation(
            "prompt-completion", messages, _tools(record, where), first, frozenset(unweighted)
        )

    def _messages(self, turns: Any, key: str, where: object) -> _Messages:
        if isinstance(turns, str):  # as in a .csv
            with suppress(ValueError, RecursionError):
                turns = json.loads(turns)
        if turns == []:
            raise BadRecord(where, f": {key} is empty.", "Remove the record.")
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            raise BadRecord(where, f": {key} is not a list of messages.", WAY_OUT)
        turns = [self._renamed(turn, KEYS_OF_MESSAGES) for turn in turns]
        parsed = _Messages("sharegpt" if turns[0].get("from") is not None else "messages")
        who, what = ("from", "value") if parsed.form == "sharegpt" else ("role", "content")
        for number, turn in enumerate(turns):
            place = MessageAt(where, number + 1, key)
            role, content = turn.get(who), self._text(turn.get(what), place)
            others = _other_keys(turn, place)
            if content is None and others.get("tool_calls"):
                content = ""
            if not isinstance(role, str) or content is None:
                raise BadRecord(place, f" has no text under {who} and {what}.", WAY_OUT)
            if (role := ROLES.get(role, role)) not in KNOWN_ROLES:
                raise BadRecord(
                    place, f" is by {turn[who]}.", f"Known roles: {', '.join((*KNOWN_ROLES, *ROLES))}."
                )
            if not _weight(turn, role, place):
                parsed.unweighted.add(number)
            parsed.messages.append({"role": role, "content": content, **others})
        return parsed

    def _text(self, content: Any, place: object) -> str | None:
        """A content that is a text, or a list of text parts, which are joined; None if it is neither."""
        if not isinstance(content, list):
            return content if isinstance(content, str) else None
        texts = []
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            if kind == "text" and isinstance(part.get("text"), str):
                texts.append(part["text"])
            elif kind == "text" or not self.drop_other_parts:
                what = f"of type {kind}" if kind != "text" else "without text"
                raise BadRecord(
                    place,
                    f" has a part {what}.",
                    "Only text can be trained on. --other_parts drop leaves other parts out.",
                )
        return "".join(texts)


@dataclass
class _Messages:
    form: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    unweighted: set[int] = field(default_factory=set)


def _system(record: dict[str, Any], read: _Messages, where: object) -> list[dict[str, Any]]:
    """The message that a record's key `system` stands for, as some of ShareGPT's form have."""
    text = record.get("system")
    if text in (None, "") or read.messages[0]["role"] == "system":
        return []
    if not isinstance(text, str):
        raise BadRecord(where, f": system is of type {type(text).__name__}, not text.", WAY_OUT)
    return [{"role": "system", "content": text}]


def _tools(record: dict[str, Any], where: object) -> list[dict[str, Any]] | None:
    """The tools of a record."""
    try:
        return tools_of(record)
    except BadTools as error:
        raise BadRecord(where, f": {error.problem}", error.way_out) from None


def _other_keys(turn: dict[str, Any], place: object) -> dict[str, Any]:
    """What a message holds besides role, content and weight."""
    try:
        calls = calls_of(turn)
    except BadTools as error:
        raise BadRecord(place, f": {error.problem}", error.way_out) from None
    read = ("role", "content", "from", "value", "weight", "tool_calls", "function_call")
    others = without_nulls({name: value for name, value in turn.items() if name not in read})
    return others if calls is None else {**others, "tool_calls": calls}


def _weight(turn: dict[str, Any], role: str, place: object) -> bool:
    """Whether a message counts, by its `weight`: OpenAI's 0 or 1 on the assistant's messages; absent or null,
    it counts."""
    weight = turn.get("weight")
    if weight is None:
        return True
    if isinstance(weight, bool) or weight not in (0, 1):
        raise BadRecord(
            place,
            f" has weight {weight!r}.",
            "A weight is 0 or 1; without it, an assistant's message counts as 1.",
        )
    if weight and role != "assistant":
        raise BadRecord(
            place,
            f" is by {role} and has weight 1.",
            "Only the assistant's messages count; --loss_on all counts everything.",
        )
    return bool(weight) or role != "assistant"


def _from_alpaca(record: dict[str, Any], where: object) -> list[dict[str, Any]]:
    """The `system` text, if any; the instruction followed by the input, as the user's message; then the
    output."""
    texts = {key: record.get(key) or "" for key in ("system", "instruction", "input", "output")}
    for key, value in texts.items():
        if not isinstance(value, str):
            raise BadRecord(where, f": {key} is of type {type(value).__name__}, not text.", WAY_OUT)
    if not any(texts.values()):
        raise BadRecord(where, ": instruction and output are empty.", "Remove the record.")
    prompt = "\n\n".join(text for text in (texts["instruction"], texts["input"]) if text)
    system = [{"role": "system", "content": texts["system"]}] if texts["system"] else []
    return [*system, {"role": "user", "content": prompt}, {"role": "assistant", "content": texts["output"]}]


def parsed_keys(text: str | None) -> tuple[tuple[str, str], ...]:
    """`--keys OURS=THEIRS,…` as pairs. Raises DataError for a key that no format has."""
    pairs = []
    for part in (text or "").split(","):
        ours, equals, theirs = part.partition("=")
        if part and not (equals and theirs and ours in (*KEYS_OF_RECORDS, *KEYS_OF_MESSAGES)):
            known = ", ".join((*KEYS_OF_RECORDS, *KEYS_OF_MESSAGES))
            raise DataError(f"--keys {text}: {part} is not KEY=NAME_IN_THE_RECORDS. Keys: {known}.")
        if part:
            pairs.append((ours, theirs))
    return tuple(pairs)
