"""Rendering of messages by the Jinja source of a chat template.

Templates differ in two things: contents are texts, or lists of parts (Idefics 3, LLaVA); and arguments of
tool calls are objects, or JSON text that the template writes as it is (DeepSeek-V3). Which one a template
reads is found out once, by rendering a conversation with a recognizable content and recognizable arguments in
each form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from megalite.data.chat.assistant_turns import PROBE, Message, Span
from megalite.data.indexed import DataError

WORD = "megalite_probe"
"""The key and value of arguments when they are located: Python and JSON spell it alike, but for the quotation
marks."""
PROBED = {WORD: WORD}


class Renderer:
    """Renders messages as transformers does.

    Args:
        source: Jinja source.
        special_tokens: the names that the source uses for control tokens.
        name: the template's name in messages.

    Attributes:
        has_marks: whether the source has {% generation %} marks.
    """

    def __init__(self, source: str, special_tokens: dict[str, Any], name: str):
        self._source, self._special_tokens, self._name = source, special_tokens, name
        self.has_marks = re.search(r"{%[-+]?\s*generation\s*[-+]?%}", source) is not None
        self._reads_parts: bool | None = None
        self._reads_json: bool | None = None

    def write(self, messages: list[Message], tools: Any, prompt: bool = False) -> tuple[str, list[Span]]:
        """Render messages and return the text with the spans that the template marks.

        With `prompt`, the text ends with the header of the assistant's next turn.

        Raises DataError if the template cannot render them.
        """
        if self._reads_parts is None:
            self._reads_parts = self._finds_parts(messages, tools)
        if self._reads_json is None and any(map(_has_arguments, messages)):
            self._reads_json = self._finds_json(messages, tools)
        return self._rendered(messages, tools, bool(self._reads_parts), bool(self._reads_json), prompt)

    def _rendered(
        self, messages: list[Message], tools: Any, parts: bool, as_json: bool, prompt: bool = False
    ) -> tuple[str, list[Span]]:
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        if as_json:
            messages = [
                _with_arguments(message, lambda arguments: json.dumps(arguments, ensure_ascii=False))
                for message in messages
            ]
        if parts:
            messages = [
                {**message, "content": [{"type": "text", "text": message.get("content", "")}]}
                for message in messages
            ]
        options = {
            "tools": tools,
            "chat_template": self._source,
            "add_generation_prompt": prompt,
            **self._special_tokens,
        }
        try:
            written: Any = render_jinja_template(
                [messages], return_assistant_tokens_mask=self.has_marks, **options
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise DataError(
                f"{self._name} failed to render the conversation: {str(error) or type(error).__name__}."
            ) from None
        texts, spans = written
        return texts[0], spans[0] if spans else []

    def _finds_parts(self, messages: list[Message], tools: Any) -> bool | None:
        """Return whether the template requires contents as lists of parts, or None if it supports neither
        form.
        """
        probes = [{**message, "content": PROBE} for message in messages]
        as_text, as_parts = (self._written(probes, tools, parts=parts) for parts in (False, True))
        return False if PROBE in as_text else True if PROBE in as_parts else None

    def _finds_json(self, messages: list[Message], tools: Any) -> bool | None:
        """Return whether the template requires arguments as JSON text, or None if it supports neither form.

        It does if it ignores objects or writes them in Python's notation.
        """
        probes = [_with_arguments(message, lambda _: PROBED) for message in messages]
        objects, texts = (
            self._written(probes, tools, parts=bool(self._reads_parts), as_json=as_json)
            for as_json in (False, True)
        )
        if WORD in objects and repr(PROBED) not in objects:
            return False
        return True if WORD in texts else None

    def _written(self, messages: list[Message], tools: Any, *, parts: bool, as_json: bool = False) -> str:
        """Return the rendered messages; empty if the template cannot render them."""
        try:
            return self._rendered(messages, tools, parts, as_json)[0]
        except DataError:
            return ""


def _has_arguments(message: Message) -> bool:
    """Return whether a message calls a tool with arguments."""
    return _with_arguments(message, lambda _: PROBED) != message


def _with_arguments(message: Message, change: Callable[[Any], Any]) -> Message:
    """Return the message with `change` applied to the arguments of its calls that are objects."""
    calls = message.get("tool_calls")
    return (
        {**message, "tool_calls": [_changed(call, change) for call in calls]}
        if isinstance(calls, list)
        else message
    )


def _changed(call: Any, change: Callable[[Any], Any]) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("arguments"), dict):
        call = {**call, "arguments": change(call["arguments"])}
    return {**call, "function": _changed(call["function"], change)} if "function" in call else call
