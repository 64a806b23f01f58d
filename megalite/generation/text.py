"""Decode the reply of a model piece by piece, in whole characters and without stop texts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from megalite.data.tokenizer.tokenizers import Tokenizer

if TYPE_CHECKING:
    from megalite.generation.language_model import LanguageModel, Sampling

# tokens of the prompt that are decoded with the first token: decoded alone it may lose its leading space
CONTEXT = 8
LONGEST_CHARACTER = 4  # bytes in UTF-8, and tokens if each is a byte
UNFINISHED = "\ufffd"  # what the bytes of an incomplete character decode to


class Reply:
    """A model's reply to a prompt.

    Args:
        ends: tokens that end it, and are not part of its text.
        stops: texts before which it ends, independent of token boundaries.

    Attributes:
        tokens: all drawn tokens, including the one that ended it.
        text: the text that may be shown so far.
        ended: whether a token of `ends` has ended it.
        stopped: whether a text of `stops` has.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        ends: Collection[int] = (),
        stops: Sequence[str] = (),
    ):
        self._tokenizer, self._ends, self._stops = tokenizer, ends, stops
        self._read = list(prompt[-CONTEXT:])  # already decoded; context for the tokens after them
        self._unread: list[int] = []
        self._held = ""  # decoded, but possibly the beginning of a stop text
        self.tokens: list[int] = []
        self.text, self.ended, self.stopped = "", False, False

    @property
    def done(self) -> bool:
        return self.ended or self.stopped

    def push(self, token: int) -> str:
        """Add a token and return the text that can be shown now: mostly its own, less or more if text is or
        was held back."""
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
        """End the reply and return the rest of its text."""
        shown = self._show(self._decoded()) if self._unread else ""
        rest, self._held, self._unread = self._held, "", []
        self.text += rest
        return shown + rest

    def _decoded(self) -> str:
        """Decode the unread tokens."""
        return self._tokenizer.decode(self._read + self._unread)[len(self._tokenizer.decode(self._read)) :]

    def _show(self, new: str) -> str:
        text = self._held + new
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        self.stopped = bool(places)
        shown = text[: min(places) if places else len(text) - self._beginning_of_stop(text)]
        self._held = "" if places else text[len(shown) :]
        self.text += shown
        return shown

    def _beginning_of_stop(self, text: str) -> int:
        """Return the length of the longest suffix of a text that is a prefix of a stop text."""
        return max(
            (size for stop in self._stops for size in range(1, len(stop)) if text.endswith(stop[:size])),
            default=0,
        )


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
    """Generate replies of at most `count` tokens to a batch of non-empty prompts.

    `show` is called with the pieces of the first reply's text.

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
