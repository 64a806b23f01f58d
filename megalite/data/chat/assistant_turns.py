"""Location of the assistant's turns in a rendered conversation.

This is used for chat templates without {% generation %} marks.

The conversation is rendered up to each turn and including it; the difference is the turn. It ends with a
token after the message (ChatML, Llama 3), in some templates followed by another one that ends the
conversation (Phi-3), or with the marker of the next role (GLM-4.5).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

from megalite.data.indexed import DataError

Message = dict[str, Any]
Span = tuple[int, int]  # characters [start, stop)
PROBE = "\ue000said\ue001"
"""Placeholder that replaces a content to locate it: private-use characters, which no template contains."""

REASONING = "<think>"
"""Start of the assistant's reasoning.

The header of a turn ends before it, even if a generation prompt ends with it.
"""


class NotLocated(Exception):
    """Raised if a turn cannot be located in the output of the template."""


@dataclass(frozen=True)
class Turn:
    """A turn of the assistant.

    Attributes:
        start, stop: the characters of its text and of the token that ends it, if there is one.
        ended: whether a token ends it.
        closing: the characters of the token that ends the conversation, if layout separates it from the turn.
    """

    start: int
    stop: int
    ended: bool
    closing: Span | None = None

    @property
    def spans(self) -> list[Span]:
        """Return the spans whose tokens are trained on."""
        return [(self.start, self.stop)] + ([] if self.closing is None else [self.closing])


@dataclass
class TemplateLayout:
    """Layout of a template: the tokens that it writes around messages.

    Attributes:
        added: the texts of tokens that can end a turn.
        markers: the texts of tokens that can begin the next message and thereby end a turn.
        ends: the texts of tokens that end the model's texts by its configuration.
        closes: whether a token follows the assistant's message; None: not determined yet.
    """

    added: tuple[str, ...]
    markers: tuple[str, ...]
    ends: frozenset[str]
    closes: bool | None = None


class TurnFinder:
    """Locates the turns of a conversation.

    Args:
        write: renders messages; with True, then the header of the assistant's next turn. Raises DataError.
        layout: the template's layout.
    """

    def __init__(self, write: Callable[[list[Message], bool], str], layout: TemplateLayout):
        self._write, self._layout = write, layout

    def turn(self, messages: list[Message], i: int, whole: str) -> Turn:
        """Locate the assistant's message i in `whole`, the rendered messages.

        Raises NotLocated or DataError.
        """
        before, opened = [self._write(messages[:i], prompt) if i else "" for prompt in (False, True)]
        after = self._write(messages[: i + 1], False)
        earlier, body = _common(before, whole, self._layout.added), _common(after, whole, self._layout.added)
        if earlier is None or body is None:
            raise NotLocated
        start = self._start(messages[: i + 1], opened, body, len(earlier))
        text = body[start:]
        stripped, said = text.rstrip(), str(messages[i].get("content", "")).rstrip()
        plain = stripped.endswith(said) if said else not stripped  # nothing follows the message
        token = _last(stripped, self._layout.added)
        if (
            token
            and not plain
            and (token in self._layout.ends or not messages[i].get("tool_calls") or self.closes(messages[:i]))
        ):
            closing = self._closing(messages[: i + 1], after, token) if after == whole else None
            stop = start + len(stripped) if closing is None else len(whole[: closing[0]].rstrip())
            return Turn(start, stop, True, closing)
        if marker := _first(whole, len(body), self._layout.markers):
            return Turn(start, marker[1], True)
        return Turn(start, start + len(text if plain else stripped), False)

    def closes(self, messages: list[Message]) -> bool:
        """Return whether the template writes a token after the assistant's last message.

        The result is determined once, with a token that follows these messages.
        """
        if self._layout.closes is None:
            try:
                text = self._write([*messages, {"role": "assistant", "content": PROBE}], False)
            except DataError:  # it needs more of a message: the next conversation may tell
                return True
            self._layout.closes = bool(_last(text.rpartition(PROBE)[2].rstrip(), self._layout.added))
        return self._layout.closes

    def missing_end(self, messages: list[Message], whole: str) -> str:
        """Return the text that ends the assistant's last message if the template itself does not end it.

        This is the text up to the marker of the next role: a tool after a call, otherwise the user. A marker
        that ends the model's texts is preferred. The result is empty if the template ends the message or
        writes no marker, or if the message cannot be located.
        """
        try:
            if self.closes(messages[:-1]) or self.turn(messages, len(messages) - 1, whole).ended:
                return ""
        except NotLocated:
            return ""
        # without reasoning and the like, which some templates leave out of messages that are not the last one
        last = {key: value for key, value in messages[-1].items() if key in ("role", "tool_calls")} | {
            "content": PROBE
        }
        candidates = []
        for role in ("tool", "user") if last.get("tool_calls") else ("user",):
            try:
                said = self._write([*messages[:-1], last], False)
                longer = self._write([*messages[:-1], last, {"role": role, "content": PROBE}], False)
            except DataError:  # the role may not follow
                continue
            if longer.startswith(said) and (marker := _first(longer, len(said), self._layout.markers)):
                ends_model_text = longer[slice(*marker)] in self._layout.ends
                candidates.append((ends_model_text, longer[len(said) : marker[1]]))
        return max(candidates, key=lambda candidate: candidate[0])[1] if candidates else ""

    def _start(self, messages: list[Message], opened: str, body: str, earlier: int) -> int:
        """Return the start of the last message.

        It is the end of the generation prompt, up to REASONING, or the start of the content without such a
        prompt. Raises NotLocated.
        """
        reasoning = opened.find(REASONING, earlier)
        if not body.startswith(opened if reasoning < 0 else opened[: reasoning + len(REASONING)]):
            raise NotLocated
        if reasoning >= 0:
            return reasoning
        return len(opened) if len(opened) > earlier else self._content(messages, body, earlier)

    def _content(self, messages: list[Message], body: str, earlier: int) -> int:
        """Return the start of the content of the last message.

        White space before it is included if there is nothing else. The message is rendered again with PROBE
        as the content: unlike a short content, PROBE cannot occur in the header.

        Raises NotLocated.
        """
        probed = self._write([*messages[:-1], {**messages[-1], "content": PROBE}], False)
        start = probed.find(PROBE, earlier)
        said = str(messages[-1].get("content", ""))
        same = start >= 0 and body[:start] == probed[:start]
        # templates may trim
        if not same or not any(body.startswith(each, start) for each in (said, said.strip())):
            raise NotLocated
        return start if body[earlier:start].strip() else earlier

    def _closing(self, messages: list[Message], whole: str, token: str) -> Span | None:
        """Locate the token that ends a conversation if text separates it from the end of the last message.

        Such a token is not written where a generation prompt follows.
        """
        stop = len(whole.rstrip())
        start = stop - len(token)
        rest = whole[:start].rstrip()
        if len(rest) == start or not _last(rest, self._layout.added):
            return None
        opened = self._write(messages, True)
        return (start, stop) if opened.startswith(rest) and not opened.startswith(whole[:stop]) else None


def _common(text: str, whole: str, added: tuple[str, ...]) -> str | None:
    """Remove the token and white space that only a last message ends with.

    None if `whole` does not begin with the rest.
    """
    if whole.startswith(text):
        return text
    stripped = text.rstrip()
    shorter = stripped.removesuffix(_last(stripped, added))
    return commonprefix([shorter, whole]) if whole.startswith(shorter.rstrip()) else None


def _last(text: str, tokens: tuple[str, ...]) -> str:
    """Return the token with which a text ends, or an empty text."""
    return max((token for token in tokens if text.endswith(token)), key=len) if text.endswith(tokens) else ""


def _first(text: str, start: int, tokens: tuple[str, ...]) -> Span | None:
    """Locate the token at a position of a text, after white space, or return None."""
    start = len(text) - len(text[start:].lstrip())
    if not text.startswith(tokens, start):
        return None
    return start, start + max(len(token) for token in tokens if text.startswith(token, start))
