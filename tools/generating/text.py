"""The text of a growing row of tokens, piece by piece: whole characters alone, and nothing of a stop text."""

from __future__ import annotations

from collections.abc import Sequence

from tools.tokenizing import Tokenizer

CONTEXT = 8  # tokens of the prompt that are decoded with the first one: by itself it may lose its leading space
LONGEST_CHARACTER = 4  # bytes in UTF-8, and tokens where each is a byte
UNFINISHED = "\ufffd"  # what bytes that are no whole character decode to


class Reply:
    """What a model answers to a prompt, as text.

    Attributes:
        text: what may be shown so far; it ends where a stop text begins.
        stopped: whether a stop text has been found.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str] = ()):
        self._tokenizer, self._stops = tokenizer, stops
        self._tokens = list(prompt[-CONTEXT:])
        self._start, self._read = 0, len(self._tokens)  # what lies between has been decoded, and is context for what follows
        self._held = ""  # decoded too, but it may be the beginning of a stop text
        self.text, self.stopped = "", False

    def push(self, token: int) -> str:
        """Add a token; returns what can be shown now: mostly its own text, less or more where something was held back."""
        self._tokens.append(token)
        new = self._decode()
        if new.endswith(UNFINISHED) and len(self._tokens) - self._read < LONGEST_CHARACTER:
            return ""
        self._start, self._read = self._read, len(self._tokens)
        return self._show(new)

    def finish(self) -> str:
        """No token follows any more; returns the rest of the text."""
        rest = "" if self.stopped else self._show(self._decode()) + self._held
        self.text += self._held
        self._held = ""
        return rest

    def _decode(self) -> str:
        """The text of the tokens that have not been read yet."""
        before = self._tokenizer.decode(self._tokens[self._start : self._read])
        return self._tokenizer.decode(self._tokens[self._start :])[len(before) :]

    def _show(self, new: str) -> str:
        text = self._held + new
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        shown = min(found) if found else len(text) - self._beginning_of_stop(text)
        self.stopped = bool(found)
        self._held = "" if found else text[shown:]
        self.text += text[:shown]
        return text[:shown]

    def _beginning_of_stop(self, text: str) -> int:
        """How many characters at the end of a text are the first ones of a stop text."""
        return max((size for stop in self._stops for size in range(1, len(stop)) if text.endswith(stop[:size])), default=0)
