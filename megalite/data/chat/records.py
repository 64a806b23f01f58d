"""Formats of chat data.

Supported are OpenAI's messages, ShareGPT's conversations, Alpaca's instructions, and TRL's prompts with
completions.

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
    'messages ({"messages": [{"role": …, "content": …}, …]}), sharegpt ({"conversations": [{"from": '
    '…, "value": …}, …]}), alpaca ({"instruction": …, "input": …, "output": …}) or prompt-completion '
    '({"prompt": …, "completion": …}, both strings or both lists of messages)'
)
WAY_OUT = f"Expected one of {FORMS}. Use --keys to map other key names to these."
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
    "chosen",
    "rejected",
    "label",
)
KEYS_OF_MESSAGES = (
    *("role", "content", "from", "value"),
    *("weight", "train", "tool_calls", "function_call", "name"),
)


LARGEST_WEIGHT = 1e30
"""Largest weight of a message: weights are stored as float32."""


class BadRecord(DataError):
    """Raised for a record that cannot be used.

    It has the location of the record, which is formatted only when it is shown, the problem, and a way out.
    """

    def __init__(self, where: object, problem: str, way_out: str = ""):
        super().__init__(where, problem, way_out)
        self.where, self.problem, self.way_out = where, problem, way_out

    @property
    def reason(self) -> str:
        """Return the location and the problem."""
        return f"{self.where}{self.problem}"

    def __str__(self) -> str:
        return f"{self.reason} {self.way_out}".rstrip()


@dataclass(frozen=True)
class MessageAt:
    """Location of a message: its `number` in the list `key` of a record."""

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
        weights: number of each message of the assistant whose weight is not 1 → its weight.
    """

    form: str
    messages: list[dict[str, Any]]
    tools: Any = None
    prompt: int = 0
    weights: Mapping[int, float] = field(default_factory=dict)


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
        """Read a conversation from a record.

        Raises BadRecord with `where` and the reason if the record is not a conversation.
        """
        if not isinstance(record, dict):
            raise BadRecord(
                where, f" is a {type(record).__name__}, not an object.", f"Expected one of {FORMS}."
            )
        record = self.renamed(record, KEYS_OF_RECORDS)
        for key in ("messages", "conversations"):
            if record.get(key):
                read = self.messages(record[key], key, where)
                first = system_of(record, read.messages, where)
                weights = _shifted(read.weights, len(first))
                return Conversation(
                    read.form, first + read.messages, tools_in(record, where), weights=weights
                )
        if record.get("prompt") is not None and record.get("completion") is not None:
            return self._from_pair(record, where)
        if "instruction" in record and "output" in record:
            return Conversation("alpaca", _from_alpaca(record, where))
        for key in ("messages", "conversations"):
            if record.get(key) is not None:
                self.messages(record[key], key, where)  # says what is wrong with it
        keys = ", ".join(map(str, record)) or "none"
        raise BadRecord(where, f" is not a conversation; its keys are {keys}.", for_chats(record) or WAY_OUT)

    def renamed(self, item: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
        """Return a record or a message with our names of its keys, of those in `names`."""
        mapped = {theirs: ours for ours, theirs in self.keys if ours in names and theirs in item}
        kept = {key: value for key, value in item.items() if key not in mapped and key not in mapped.values()}
        return {ours: item[theirs] for theirs, ours in mapped.items()} | kept if mapped else item

    def _from_pair(self, record: dict[str, Any], where: object) -> Conversation | PromptCompletion:
        """Read two texts as a PromptCompletion, or two lists of messages as a conversation.

        The loss is computed on the completion.
        """
        if record.get("label") is False:  # TRL's unpaired preferences
            raise BadRecord(
                where,
                " has label=false, so its completion is a rejected one.",
                "Prepare such records with --preference instead of --chat, or remove them.",
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
                f": prompt and completion must be both strings or both lists of messages, got {kinds}.",
                WAY_OUT,
            )
        read = [self.messages(record[key], key, where) for key in ("prompt", "completion")]
        first, messages = len(read[0].messages), read[0].messages + read[1].messages
        weights = read[0].weights | _shifted(read[1].weights, first)
        return Conversation("prompt-completion", messages, tools_in(record, where), first, weights)

    def messages(self, turns: Any, key: str, where: object) -> Messages:
        """Read a list of messages, which a record has in `key`. Raises BadRecord."""
        if isinstance(turns, str):  # as in a .csv
            with suppress(ValueError, RecursionError):
                turns = json.loads(turns)
        if turns == []:
            raise BadRecord(where, f": {key} is empty.", "Remove the record.")
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            raise BadRecord(where, f": {key} is not a list of messages.", WAY_OUT)
        turns = [self.renamed(turn, KEYS_OF_MESSAGES) for turn in turns]
        parsed = Messages("sharegpt" if turns[0].get("from") is not None else "messages")
        who, what = ("from", "value") if parsed.form == "sharegpt" else ("role", "content")
        for number, turn in enumerate(turns):
            place = MessageAt(where, number + 1, key)
            role, content = turn.get(who), self._text(turn.get(what), place)
            others = _other_keys(turn, place)
            if content is None and others.get("tool_calls"):
                content = ""
            if not isinstance(role, str) or content is None:
                raise BadRecord(place, f" must have strings in {who} and {what}.", WAY_OUT)
            if (role := ROLES.get(role, role)) not in KNOWN_ROLES:
                raise BadRecord(
                    place,
                    f" has an unknown role {turn[who]!r}.",
                    f"Supported roles: {', '.join((*KNOWN_ROLES, *ROLES))}.",
                )
            if (weight := _weight(turn, role, place)) != 1:
                parsed.weights[number] = weight
            parsed.messages.append({"role": role, "content": content, **others})
        return parsed

    def _text(self, content: Any, place: object) -> str | None:
        """Return the text of a content, or None if it is neither text nor a list of text parts."""
        if not isinstance(content, list):
            return content if isinstance(content, str) else None
        texts = []
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            if kind == "text" and isinstance(part.get("text"), str):
                texts.append(part["text"])
            elif kind == "text" or not self.drop_other_parts:
                what = f"of unsupported type {kind}" if kind != "text" else "without text"
                raise BadRecord(
                    place,
                    f" has a part {what}.",
                    "Only text parts are supported. Pass --other_parts drop to ignore the others.",
                )
        return "".join(texts)


@dataclass
class Messages:
    """Messages, as in `Conversation`, with the name of their form."""

    form: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    weights: dict[int, float] = field(default_factory=dict)


def _shifted(weights: Mapping[int, float], by: int) -> dict[int, float]:
    return {number + by: weight for number, weight in weights.items()}


def system_of(record: dict[str, Any], messages: list[dict[str, Any]], where: object) -> list[dict[str, Any]]:
    """Return the system message of a record with a key `system`, as in some ShareGPT data.

    It is empty if the messages begin with one.
    """
    text = record.get("system")
    if text in (None, "") or messages[0]["role"] == "system":
        return []
    if not isinstance(text, str):
        raise BadRecord(where, f": system must be a string, got {type(text).__name__}.", WAY_OUT)
    return [{"role": "system", "content": text}]


def tools_in(record: dict[str, Any], where: object) -> list[dict[str, Any]] | None:
    """Return the tools of a record."""
    try:
        return tools_of(record)
    except BadTools as error:
        raise BadRecord(where, f": {error.problem}", error.way_out) from None


def _other_keys(turn: dict[str, Any], place: object) -> dict[str, Any]:
    """Return the keys of a message other than role, content and what says how it counts."""
    try:
        calls = calls_of(turn)
    except BadTools as error:
        raise BadRecord(place, f": {error.problem}", error.way_out) from None
    read = ("role", "content", "from", "value", "weight", "train", "tool_calls", "function_call")
    others = without_nulls({name: value for name, value in turn.items() if name not in read})
    return others if calls is None else {**others, "tool_calls": calls}


def _weight(turn: dict[str, Any], role: str, place: object) -> float:
    """Return the weight of the loss of a message; 1 if the assistant does not write it.

    It is the message's `weight`, by default 1, or 0 with `train` false, which axolotl and others write.
    """
    weight, train = turn.get("weight"), turn.get("train")
    if train is not None and not isinstance(train, bool):
        raise BadRecord(place, f" has an invalid train {train!r}.", "It must be true or false.")
    if weight is not None and (
        isinstance(weight, bool)
        or not isinstance(weight, (int, float))
        or not abs(weight) <= LARGEST_WEIGHT  # not for NaN
    ):
        raise BadRecord(
            place,
            f" has an invalid weight {weight!r}.",
            f"The weight must be a finite number up to {LARGEST_WEIGHT:g} (default: 1).",
        )
    if weight and train is False:
        raise BadRecord(
            place, f" has weight {weight} and train false.", "Remove one of the two, or set the weight to 0."
        )
    if role != "assistant":
        if weight or train:
            said = "train true" if train else f"weight {weight}"
            raise BadRecord(
                place,
                f" has {said}, but its role is {role}.",
                "Only messages of the assistant can have a weight other than 0. Use --loss_on all to train "
                "on all messages.",
            )
        return 1
    return 0 if train is False else 1 if weight is None else weight


def _from_alpaca(record: dict[str, Any], where: object) -> list[dict[str, Any]]:
    """Return the messages of an Alpaca record."""
    prompt, output = instruction_of(record, where), record.get("output") or ""
    if not isinstance(output, str):
        raise BadRecord(where, f": output must be a string, got {type(output).__name__}.", WAY_OUT)
    if not output and not any(message["content"] for message in prompt):
        raise BadRecord(where, ": instruction and output are empty.", "Remove the record.")
    return [*prompt, {"role": "assistant", "content": output}]


def instruction_of(record: dict[str, Any], where: object) -> list[dict[str, Any]]:
    """Return the messages of an Alpaca record before the output.

    The user's message is the instruction followed by the input. A `system` text comes first.
    """
    texts = {key: record.get(key) or "" for key in ("system", "instruction", "input")}
    for key, value in texts.items():
        if not isinstance(value, str):
            raise BadRecord(where, f": {key} must be a string, got {type(value).__name__}.", WAY_OUT)
    prompt = "\n\n".join(text for text in (texts["instruction"], texts["input"]) if text)
    system = [{"role": "system", "content": texts["system"]}] if texts["system"] else []
    return [*system, {"role": "user", "content": prompt}]


def parsed_keys(text: str | None) -> tuple[tuple[str, str], ...]:
    """Parse `--keys OURS=THEIRS,…` to pairs.

    Raises DataError for a key that no format has.
    """
    pairs = []
    for part in (text or "").split(","):
        ours, equals, theirs = part.partition("=")
        if part and not (equals and theirs and ours in (*KEYS_OF_RECORDS, *KEYS_OF_MESSAGES)):
            known = ", ".join((*KEYS_OF_RECORDS, *KEYS_OF_MESSAGES))
            raise DataError(
                f"Invalid value for --keys: {part!r}. Expected KEY=NAME_IN_THE_RECORDS, where KEY is one of "
                f"{known}."
            )
        if part:
            pairs.append((ours, theirs))
    return tuple(pairs)
