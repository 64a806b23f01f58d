"""Formats of preference data: pairs of a chosen and a rejected completion, and completions with a label.

Supported are TRL's records, with a prompt of their own or one that both completions begin with, and the
records of axolotl and LLaMA-Factory, whose prompt is an instruction or a list of messages. A record's keys
determine its format.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal

from megalite.data.chat.record_hints import for_preferences, for_prompts
from megalite.data.chat.records import (
    KEYS_OF_RECORDS,
    BadRecord,
    RecordReader,
    instruction_of,
    system_of,
    tools_in,
)

Kind = Literal["pairs", "labelled"]
Said = str | list[dict[str, Any]]
"""A text, or messages."""
WAY_OUT = (
    'Expected pairs ({"chosen": …, "rejected": …}), or completions with a label ({"completion": …, "label": '
    "true}), with their prompt in prompt, instruction, messages or conversations; or a conversation with a "
    "label. Use --keys to map other key names to these."
)
KEYS_OF_ANSWERS = ("chosen", "rejected", "tools", "functions")
"""Keys of a pair that are read without a prompt."""
LABELS = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True)
class Preference:
    """A prompt with completions: texts, or messages as chat templates expect them.

    Attributes:
        form: the format of the record.
        completions: the chosen and the rejected one of a pair, or a single one.
        labels: whether each completion is chosen or good.
        tools: the record's tools as objects.
    """

    form: str
    prompt: Said
    completions: tuple[Said, ...]
    labels: tuple[bool, ...]
    tools: Any = None

    @property
    def kind(self) -> Kind:
        return "pairs" if len(self.completions) == 2 else "labelled"


@dataclass(frozen=True)
class PreferenceReader:
    """Reads preferences from records.

    Attributes:
        records: reads messages, and has the names of keys in the records.
        kind: what the data is. The two completions of a pair can also be labelled ones, but not the other way
            round. None: either.
    """

    records: RecordReader = RecordReader()
    kind: Kind | None = None

    def read(self, record: Any, where: object) -> Preference:
        """Read a preference from a record.

        Raises BadRecord with `where` and the reason if the record is not a preference of this kind.
        """
        if not isinstance(record, dict):
            raise BadRecord(where, f" is a {type(record).__name__}, not an object.", WAY_OUT)
        record = self.records.renamed(record, KEYS_OF_RECORDS)
        if record.get("chat_template_kwargs"):
            raise BadRecord(
                where,
                " has chat_template_kwargs, which are not supported.",
                "Remove them, and pass a --chat_template FILE that needs none.",
            )
        pair = [key for key in ("chosen", "rejected") if record.get(key) is not None]
        if len(pair) == 1:
            other = "rejected" if pair == ["chosen"] else "chosen"
            raise BadRecord(where, f" has {pair[0]} but no {other}.", "Add it, or remove the record.")
        if pair:
            return self._pair(record, where)
        if self.kind == "pairs":
            raise BadRecord(
                where,
                " has no chosen and rejected, and earlier records are pairs.",
                for_preferences(record) or "Prepare pairs and completions with a label separately.",
            )
        return self._labelled(record, where)

    def _pair(self, record: dict[str, Any], where: object) -> Preference:
        prompt, form = self._prompt(record, where, ("chosen", "rejected"))
        chosen, rejected = (self._completion(record, key, prompt, where) for key in ("chosen", "rejected"))
        if isinstance(chosen, str) is not isinstance(rejected, str):
            kinds = f"{type(record['chosen']).__name__} and {type(record['rejected']).__name__}"
            raise BadRecord(
                where, f": chosen and rejected must both be texts or both messages, got {kinds}.", WAY_OUT
            )
        # some data sets have the text of a prompt beside messages that begin with it
        if prompt is None or (isinstance(prompt, str) and not isinstance(chosen, str)):
            prompt, chosen, rejected = _split(chosen, rejected, record, where)
            form = "implicit"
        tools = tools_in(record, where)
        return Preference(f"{form}-chosen-rejected", prompt, (chosen, rejected), (True, False), tools)

    def _labelled(self, record: dict[str, Any], where: object) -> Preference:
        label = record.get("label") if record.get("label") is not None else record.get("kto_tag")
        if label is None:
            keys = ", ".join(map(str, record)) or "none"
            way_out = for_preferences(record) or WAY_OUT
            raise BadRecord(
                where, f" has neither chosen and rejected nor label; its keys are {keys}.", way_out
            )
        good = LABELS.get(str(label).lower())
        if good is None:
            raise BadRecord(where, f" has an invalid label {label!r}.", "It must be true or false.")
        answer = next((key for key in ("completion", "output") if record.get(key) is not None), None)
        prompt, form = self._prompt(record, where, () if answer is None else (answer,))
        if answer is not None:
            if prompt is None:
                _, keys = for_prompts(record, "", (*KEYS_OF_ANSWERS, answer))
                raise BadRecord(where, f" has {answer} but no prompt.", f"Pass {keys}." if keys else WAY_OUT)
            completion = self._completion(record, answer, prompt, where)
            if isinstance(prompt, str) is not isinstance(completion, str):
                kinds = f"{type(record['prompt']).__name__} and {type(record[answer]).__name__}"
                raise BadRecord(
                    where, f": prompt and {answer} must both be texts or both messages, got {kinds}.", WAY_OUT
                )
        elif isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
            prompt, completion = prompt[:-1], prompt[-1:]
            _check_completion(completion, "the last message", where)
        else:
            raise BadRecord(where, " has a label but no completion.", WAY_OUT)
        if isinstance(prompt, list) and not prompt:
            raise BadRecord(where, " has a completion but no message before it.", "Add a prompt.")
        return Preference(f"{form}-label", prompt, (completion,), (good,), tools_in(record, where))

    def _prompt(
        self, record: dict[str, Any], where: object, answers: tuple[str, ...]
    ) -> tuple[Said | None, str]:
        """Find the prompt of a record apart from its completions.

        Messages with a completion may be a whole conversation, as in UltraFeedback. They are a prompt only if
        nothing else is one and nobody has answered the last of them.

        Args:
            answers: keys of the completions; none if the last message is one.

        Returns:
            The prompt, or None if the completions begin with it or it has none, and its form.

        Raises:
            BadRecord: a prompt that cannot be read, or messages whose last one is an answer already.
        """
        prompt = record.get("prompt")
        whole = next((key for key in ("messages", "conversations") if record.get(key)), None)
        if not answers and whole:
            return self._messages(record, whole, where), whole
        if isinstance(prompt, list) and prompt:
            return self._messages(record, "prompt", where), "prompt"
        texts = all(isinstance(value, str) for value in (prompt, *map(record.get, answers)))
        if prompt and texts and "instruction" not in record:
            return _text_of(record, where), "prompt"
        if self._begin_with_prompt(record, where):
            return None, "prompt"
        said = self._messages(record, whole, where) if whole else []
        if whole and said[-1]["role"] != "assistant":
            return said, whole
        if "instruction" in record:
            return instruction_of(record, where), "instruction"
        if whole and prompt is None:
            raise BadRecord(
                where,
                f": {whole} end in a turn of the assistant, so they are no prompt of {answers[0]}.",
                "Remove that turn, or add the prompt alone.",
            )
        return _text_of(record, where), "prompt"

    def _messages(self, record: dict[str, Any], key: str, where: object) -> list[dict[str, Any]]:
        """Return the messages of a record, after its system text if they have none."""
        messages = self.records.messages(record[key], key, where).messages
        return system_of(record, messages, where) + messages

    def _begin_with_prompt(self, record: dict[str, Any], where: object) -> bool:
        """Return whether both completions are messages of which the first is the same and not an answer.

        Raises BadRecord if it cannot be read.
        """
        chosen, rejected = record.get("chosen"), record.get("rejected")
        if not (isinstance(chosen, list) and isinstance(rejected, list) and chosen[:1] == rejected[:1]):
            return False
        first = self.records.messages(chosen[:1], "chosen", where).messages[0]
        return first["role"] not in ("assistant", "tool")

    def _completion(self, record: dict[str, Any], key: str, prompt: Said | None, where: object) -> Said:
        """Return a completion: messages, or a text if the prompt is no list of messages."""
        value = record[key]
        if isinstance(value, str) and not isinstance(prompt, list):
            completion: Said = value
        else:
            turns = [{"role": "assistant", "content": value}] if isinstance(value, str) else value
            read = self.records.messages([turns] if isinstance(turns, dict) else turns, key, where)
            if read.weights:
                raise BadRecord(
                    where,
                    f": a message of {key} has a weight, which preferences do not support.",
                    "Remove weight and train from the messages.",
                )
            completion = read.messages
        _check_completion(completion, key, where)
        return completion


def _text_of(record: dict[str, Any], where: object) -> str | None:
    """Return the text of a prompt. Raises BadRecord if it is something else or has a system text."""
    prompt = record.get("prompt")
    if prompt is not None and not isinstance(prompt, str):
        raise BadRecord(where, ": prompt is neither a text nor a list of messages.", WAY_OUT)
    if prompt is not None and record.get("system"):
        raise BadRecord(
            where,
            " has a system text, but its prompt is a text, to which no chat template is applied.",
            "Pass --keys instruction=prompt to apply the chat template.",
        )
    return prompt


def _check_completion(completion: Said, key: str, where: object) -> None:
    """Raise BadRecord if a completion is empty."""
    said = [completion] if isinstance(completion, str) else completion
    if not any(each if isinstance(each, str) else each["content"] or each.get("tool_calls") for each in said):
        raise BadRecord(where, f": {key} is empty.", "Remove the record.")


def _split(chosen: Said, rejected: Said, record: dict[str, Any], where: object) -> tuple[Said, Said, Said]:
    """Split completions that begin with their prompt.

    As in TRL, the prompt leaves at least one message or character of each, and the space before a word
    belongs to the word.

    Returns:
        The prompt that both completions begin with, and what follows it in each.

    Raises:
        BadRecord: there is none although messages or other keys of the record need one.
    """
    common = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False)))
    shared = min(common, len(chosen) - 1, len(rejected) - 1)
    if shared == common and shared and chosen[shared - 1] == " ":
        shared -= 1
    prompt = chosen[:shared]
    if isinstance(prompt, list):
        if not prompt:
            _, keys = for_prompts(record, "", KEYS_OF_ANSWERS)
            raise BadRecord(
                where,
                ": chosen and rejected begin with different messages, so there is no prompt.",
                f"{f'Pass {keys}' if keys else 'Add the messages before both'}, or add a prompt.",
            )
        return system_of(record, prompt, where) + prompt, chosen[shared:], rejected[shared:]
    unread, keys = for_prompts(record, prompt, KEYS_OF_ANSWERS)
    if unread:
        raise BadRecord(
            where,
            f" has no prompt that is read: its keys {', '.join(unread)} are not.",
            f"{f'Pass {keys}' if keys else 'Add a prompt'}, or add the key prompt, empty if there is none.",
        )
    return prompt, chosen[shared:], rejected[shared:]
