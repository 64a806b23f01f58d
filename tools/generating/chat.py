"""A conversation on the terminal, through the tokenizer's chat template.

Every turn reads the whole conversation again: a template may render earlier turns otherwise than it did (some leave out what the model
thought), and reading is fast beside writing. Rank 0 has the terminal; what is typed there goes to all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from megalite.checkpoint.agreement import on_rank_0
from megalite.config.schema import ConfigError
from tools.generating import LanguageModel, Sampling
from tools.generating.text import reply_to
from tools.tokenizing import HuggingFaceTokenizer, Tokenizer

Message = dict[str, str]  # role, content
SAID = "said"  # a content to render, to see what a template puts behind it


class Template:
    """The chat template of a Hugging Face tokenizer. Raises ConfigError where there is none."""

    def __init__(self, tokenizer: Tokenizer):
        if not isinstance(tokenizer, HuggingFaceTokenizer) or not tokenizer.library.chat_template:
            raise ConfigError(f"--chat: the tokenizer {tokenizer.name} has no chat template. Give one that has with --tokenizer HF_DIR.")
        self._library: Any = tokenizer.library

    def tokens(self, messages: Sequence[Message]) -> list[int]:
        """The conversation, and the beginning of the assistant's next turn. Raises ConfigError where the template refuses it."""
        return self._library.encode(self._rendered(messages, add_generation_prompt=True), add_special_tokens=False)

    def end_of_turn(self) -> frozenset[int]:
        """The special token, if any, that the template puts behind what the assistant says."""
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": SAID}]
        after = self._rendered(turns).rpartition(SAID)[2]
        first = self._library.encode(after, add_special_tokens=False)[:1]
        return frozenset(first) & frozenset(self._library.all_special_ids)

    def _rendered(self, messages: Sequence[Message], **options: Any) -> str:
        from jinja2.exceptions import TemplateError

        try:
            return self._library.apply_chat_template(list(messages), tokenize=False, **options)
        except TemplateError as error:
            raise ConfigError(f"--chat: the tokenizer's chat template refuses this conversation: {error}") from None


def converse(
    model: LanguageModel,
    tokenizer: Tokenizer,
    count: int,
    sampling: Sampling,
    *,
    ends: frozenset[int],
    stops: Sequence[str],
    system: str | None,
    show: Callable[[str], object],
) -> None:
    """Answer what is typed, line by line, until the input ends. Where the model's context is full, the oldest turns are forgotten."""
    template = Template(tokenizer)
    beginning = [{"role": "system", "content": system}] if system else []
    turns: list[Message] = []
    ends |= template.end_of_turn()
    while (line := on_rank_0(model.mesh, _line)) is not None:
        if not line.strip():
            continue
        turns.append({"role": "user", "content": line})
        while len(prompt := template.tokens(beginning + turns)) >= model.longest and len(turns) > 1:
            del turns[:2]
        (reply,) = reply_to(model, tokenizer, [prompt], count, sampling, ends=ends, stops=stops, show=show)
        show("\n")
        turns.append({"role": "assistant", "content": reply.text})


def _line() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None
