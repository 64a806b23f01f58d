"""The text of what a model says, piece by piece: whole characters alone, and nothing of a text that stops it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from megalite.data.tokenizers import Tokenizer

if TYPE_CHECKING:
    from megalite.generation.language_model import LanguageModel, Sampling

CONTEXT = 8  # tokens of the prompt that are decoded with the first one: by itself it may lose its leading space
LONGEST_CHARACTER = 4  # bytes in UTF-8, and tokens where each is a byte
UNFINISHED = "\ufffd"  # what bytes that are no whole character decode to


class Reply:
    """What a model says to a prompt.

    Args:
        ends: tokens that end it, and are no text.
        stops: texts that end it where they begin, wherever tokens are cut.

    Attributes:
        tokens: all that were drawn, the one that ended it included.
        text: what may be shown so far.
        ended: whether a token of `ends` has ended it; `stopped`: whether a text of `stops` has.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], ends: Collection[int] = (), stops: Sequence[str] = ()):
        self._tokenizer, self._ends, self._stops = tokenizer, ends, stops
        self._read = list(prompt[-CONTEXT:])  # decoded: context for what follows
        self._unread: list[int] = []
        self._held = ""  # decoded, but it may be the beginning of a stop text
        self.tokens: list[int] = []
        self.text, self.ended, self.stopped = "", False, False

    @property
    def done(self) -> bool:
        return self.ended or self.stopped

    def push(self, token: int) -> str:
        """Add a token; returns what can be shown now: mostly its own text, less or more where something was held back."""
        self.tokens.append(token)
        if token in self._ends:
            self.ended = True
            return self.finish()
        self._unread.append(token)
        new = self._decoded()
        if new.endswith(UNFINISHED) and len(self._unread) < LONGEST_CHARACTER:
            return ""
        self._read, self._unread = self._unread, []
        return self._show(new)

    def finish(self) -> str:
        """No token follows any more; returns the rest of the text."""
        shown = self._show(self._decoded()) if self._unread else ""
        rest, self._held, self._unread = self._held, "", []
        self.text += rest
        return shown + rest

    def _decoded(self) -> str:
        """The text of the tokens that have not been read."""
        return self._tokenizer.decode(self._read + self._unread)[len(self._tokenizer.decode(self._read)) :]

    def _show(self, new: str) -> str:
        text = self._held + new
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        self.stopped = bool(found)
        shown = text[: min(found) if found else len(text) - self._beginning_of_stop(text)]
        self._held = "" if found else text[len(shown) :]
        self.text += shown
        return shown

    def _beginning_of_stop(self, text: str) -> int:
        """How many characters at the end of a text are the first ones of a stop text."""
        return max((size for stop in self._stops for size in range(1, len(stop)) if text.endswith(stop[:size])), default=0)


def reply_to(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    count: int,
    sampling: Sampling,
    *,
    ends: Collection[int] = (),
    stops: Sequence[str] = (),
    show: Callable[[str], object] = lambda piece: None,
) -> list[Reply]:
    """Replies of at most `count` tokens to prompts, which are not empty, all at once. `show` gets the pieces of the first one's text.

    Collective, with the same arguments on every rank.
    """
    replies = [Reply(tokenizer, prompt, ends, stops) for prompt in prompts]
    for tokens in model.continuations(prompts, count, sampling, vocab_size=tokenizer.vocab_size):
        for number, (reply, token) in enumerate(zip(replies, tokens, strict=True)):
            piece = "" if reply.done else reply.push(token)
            if piece and number == 0:
                show(piece)
        if all(reply.done for reply in replies):
            break
    for number, reply in enumerate(replies):
        rest = "" if reply.done else reply.finish()
        if rest and number == 0:
            show(rest)
    return replies
