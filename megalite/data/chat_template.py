"""Conversations to tokens by a chat template, and which of the tokens the assistant writes.

A template is Jinja source as Hugging Face tokenizers carry it, rendered as they render it. What the assistant writes in it, up to and with
the token that ends its turn, is found exactly: by the template's own {% generation %} marks where it has them, else by rendering the
conversation up to each turn. What a message says never becomes a control token, however it is spelt.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from megalite.data.indexed import DataError
from megalite.data.tokenizers import CLOSE, OPEN, Tokenizer

DEFAULT_TEMPLATE = Path(__file__).with_name("default.jinja")
"""For tokenizers that have none: <|role|> on a line of its own, what is said, and after the assistant's words EOS."""
LossOn = Literal["assistant", "last", "all"]
Message = dict[str, Any]
Span = tuple[int, int]  # characters [start, stop)
PROBE = "\ue000said\ue001"
"""Stands for what the assistant says where its header is looked for: of private-use characters, which no header holds."""


def read_template(path: Path) -> str:
    """The Jinja source in a file. Raises DataError where it can not be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise DataError(f"--chat_template {path} can not be read: {reason}. Give a file with the template's Jinja source.") from None


class ChatTemplate:
    """How a tokenizer's model is spoken to.

    source: Jinja source, instead of the tokenizer's own template or, where it has none, DEFAULT_TEMPLATE. Attributes: `source`, and `hash`,
    which identifies it.
    """

    def __init__(self, tokenizer: Tokenizer, source: str | None = None):
        self._tokenizer = tokenizer
        self.source = source or tokenizer.chat_template or DEFAULT_TEMPLATE.read_text(encoding="utf-8")
        self.hash = sha256(self.source.encode()).hexdigest()[:16]
        self._has_marks = re.search(r"{%[-+]?\s*generation\s*[-+]?%}", self.source) is not None
        self._controls = re.compile("|".join(map(re.escape, sorted(tokenizer.controls, key=len, reverse=True))) or "(?!)")

    def render(self, messages: Sequence[Message], *, tools: Any = None, loss_on: LossOn = "assistant") -> tuple[list[int], list[int]]:
        """A whole conversation: its tokens, and for each 1 where its loss counts, else 0.

        messages: each with `role` and `content`, and what else the template knows; tools: as the template takes them.
        loss_on: what the assistant writes, in its last turn alone, or everything. Raises DataError where the template can not write the
        conversation, or does not show where the assistant's turns begin.
        """
        said, tools = self._marked(list(messages)), self._marked(tools)
        text, spans = self._write(said, tools)
        if loss_on == "all":
            spans = [(0, len(text))]
        elif not self._has_marks:
            spans = self._turns(said, tools, text)[-1 if loss_on == "last" else 0 :]
        elif loss_on == "last" and spans:
            before = said[: max((i for i, message in enumerate(said) if message["role"] == "assistant"), default=0)]
            spans = spans[len(self._write(before, tools)[1]) if before else 0 :]
        counts = bytearray(len(text) + 1)  # of each character
        for start, stop in spans:
            counts[start:stop] = b"\1" * (stop - start)
        tokens = self._tokenizer.encode_rendered(text)
        return [token for token, _, _ in tokens], [int(1 in counts[start : max(stop, start + 1)]) for _, start, stop in tokens]

    def prompt(self, messages: Sequence[Message], *, tools: Any = None) -> list[int]:
        """The tokens of a conversation that the assistant is to continue, the header of its turn included. Raises DataError as `render`."""
        text, _ = self._write(self._marked(list(messages)), self._marked(tools), prompt=True)
        return [token for token, _, _ in self._tokenizer.encode_rendered(text)]

    def end_of_turn(self) -> int:
        """The token with which the assistant ends its turn: the last that counts of what it says."""
        tokens, counts = self.render([{"role": "user", "content": "?"}, {"role": "assistant", "content": "said"}])
        return [token for token, counted in zip(tokens, counts, strict=True) if counted][-1]

    def _marked(self, value: Any) -> Any:
        """The same with marks around what reads like a control token, lone surrogates replaced, and no key that has no value."""
        if isinstance(value, str):
            valid = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            return self._controls.sub(rf"{OPEN}\g<0>{CLOSE}", valid)
        if isinstance(value, dict):
            return {self._marked(key): self._marked(each) for key, each in value.items() if each is not None}
        return [self._marked(each) for each in value] if isinstance(value, list) else value

    def _write(self, messages: list[Message], tools: Any, prompt: bool = False) -> tuple[str, list[Span]]:
        """What the template makes of the messages, and the spans that it marks."""
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        options = {"tools": tools, "chat_template": self.source, "add_generation_prompt": prompt, **self._tokenizer.special_tokens}
        try:
            written: Any = render_jinja_template([messages], return_assistant_tokens_mask=self._has_marks, **options)
        except (TemplateError, TypeError, ValueError) as error:
            raise DataError(f"the chat template (hash {self.hash}) can not write it: {str(error) or type(error).__name__}.") from None
        texts, spans = written
        return texts[0], spans[0] if spans else []

    def _turns(self, messages: list[Message], tools: Any, whole: str) -> list[Span]:
        """What the assistant writes in each of its turns, found by what the template adds to the messages before."""
        spans = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, opened = [self._write(messages[:i], tools, prompt)[0] if i else "" for prompt in (False, True)]
            after, _ = self._write(messages[: i + 1], tools)
            said = str(message.get("content", ""))
            start = len(opened) if len(opened) > len(before) else self._after_header(messages[: i + 1], tools, after, len(before))
            if not (whole.startswith(after) and after.startswith(opened) and after.startswith(before) and start >= 0):
                raise DataError(
                    f"the chat template (hash {self.hash}) writes the messages up to number {i + 1} in another way when others follow, or "
                    "opens the assistant's turn in another way than its prompt: what the assistant writes can not be told from the rest. "
                    "Give a --chat_template FILE that has {% generation %} … {% endgeneration %} around it, or take --loss_on all."
                )
            spans.append((start, start + _turn_length(after[start:], said.rstrip())))
        return spans

    def _after_header(self, messages: list[Message], tools: Any, after: str, earliest: int) -> int:
        """Where the words of the last message begin in `after`, what the template writes of the messages; -1 where that can not be told.

        Other words stand behind the same header: they are not mistaken for it, as short ones might be.
        """
        probed, _ = self._write([*messages[:-1], {**messages[-1], "content": PROBE}], tools)
        start = probed.find(PROBE, earliest)
        said = str(messages[-1].get("content", ""))
        same = start >= 0 and after[:start] == probed[:start]
        return start if same and any(after.startswith(each, start) for each in (said, said.strip())) else -1  # templates may trim


def _turn_length(turn: str, said: str) -> int:
    """Characters of a turn up to and with its end-of-turn token; white space after that belongs to the layout. Where the template has no
    such token, white space is what ends the turn."""
    stripped = turn.rstrip()
    ends_in_words = stripped.endswith(said) if said else not stripped
    return len(turn) if ends_in_words else len(stripped)
