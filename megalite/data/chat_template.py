"""Conversations to tokens by a chat template, and which of the tokens the assistant writes.

A template is Jinja source as in Hugging Face tokenizers, rendered as they render it. The assistant's text, up to and including the token
that ends its turn, is located exactly: by the template's {% generation %} marks if it has them, else by rendering the conversation up to
each turn. The content of a message never becomes a control token, even if it is spelled like one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, NoReturn

from megalite.data.indexed import DataError
from megalite.data.tokenizers import CLOSE, OPEN, Placed, Tokenizer

DEFAULT_TEMPLATE = Path(__file__).with_name("default.jinja")
"""For tokenizers without a template: <|role|> on a line of its own, the content, and EOS after the assistant's content."""
LossOn = Literal["assistant", "last", "all"]
Message = dict[str, Any]
Span = tuple[int, int]  # characters [start, stop)
PROBE = "\ue000said\ue001"
"""Replaces the assistant's content when its header is located: private-use characters, which no header has."""


def read_template(path: Path) -> str:
    """The Jinja source in a file. Raises DataError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise DataError(f"--chat_template {path} can not be read: {reason}. Give a file with the template's Jinja source.") from None


def template_hash(source: str) -> str:
    """What identifies a template."""
    return sha256(source.encode()).hexdigest()[:16]


class ChatTemplate:
    """The chat template of a tokenizer's model.

    source: Jinja source; by default the tokenizer's own template or, if it has none, DEFAULT_TEMPLATE. Attributes: `source`, and `hash`,
    which identifies it. Raises DataError if the tokenizer has templates and none of them is the default, as transformers does.
    """

    def __init__(self, tokenizer: Tokenizer, source: str | None = None):
        self._tokenizer = tokenizer
        if source is None and tokenizer.chat_template is None and tokenizer.other_templates:
            raise DataError(
                f"--tokenizer {tokenizer.name} has no default chat template, only {', '.join(tokenizer.other_templates)}. "
                "Give the one to use with --chat_template FILE."
            )
        self.source = source or tokenizer.chat_template or DEFAULT_TEMPLATE.read_text(encoding="utf-8")
        self.hash = template_hash(self.source)
        self._has_marks = re.search(r"{%[-+]?\s*generation\s*[-+]?%}", self.source) is not None
        self._controls = re.compile("|".join(map(re.escape, sorted(tokenizer.controls, key=len, reverse=True))) or "(?!)")

    def render(
        self, messages: Sequence[Message], *, tools: Any = None, loss_on: LossOn = "assistant", without: Collection[int] = ()
    ) -> tuple[list[int], list[int]]:
        """The tokens of a whole conversation, and for each token 1 if its loss is counted, else 0.

        Args:
            messages: each with `role` and `content`, and any other keys that the template reads.
            tools: in the template's format.
            loss_on: the assistant's turns (assistant), its last turn only (last), or everything (all).
            without: numbers of the assistant's messages that do not count.

        Raises:
            DataError: the template cannot render the conversation, ignores its tools or calls, or the assistant's turns cannot be located.
        """
        said, tools = self._marked(list(messages)), self._marked(tools)
        text, marked = self._write(said, tools)
        self._check_tools(said, tools, text)
        turns = [i for i, message in enumerate(said) if message["role"] == "assistant"]
        turns = turns[-1:] if loss_on == "last" else turns
        chosen = [i for i in turns if i not in without]
        counts = bytearray(len(text) + 1)  # one per character
        if loss_on == "all":
            _set(counts, [(0, len(text))], 1)
            _set(counts, self._turns(said, tools, text, marked, [i for i in turns if i in without]), 0)
        elif loss_on == "assistant" and self._has_marks and chosen == turns:
            _set(counts, marked, 1)  # of all messages: not each mark needs to be attributed to its message
        else:
            _set(counts, self._turns(said, tools, text, marked, chosen), 1)
        return _masked(self._tokenizer.encode_rendered(text), counts)

    def pair(self, prompt: str, completion: str, *, loss_on: LossOn = "assistant") -> tuple[list[int], list[int]]:
        """The tokens of a text and its continuation, without a template: BOS if the tokenizer adds it, both texts, EOS.

        As `render`, with a mask; the continuation and EOS count, or with `all` everything.
        """
        before, after = self._marked(prompt), self._marked(completion)
        counts = bytearray(len(before) + len(after) + 1)
        _set(counts, [(0 if loss_on == "all" else len(before), len(counts))], 1)
        tokens, mask = _masked(self._tokenizer.encode_rendered(before + after), counts)
        begin = [self._tokenizer.bos] if self._tokenizer.adds_bos and self._tokenizer.bos is not None else []
        return [*begin, *tokens, self._tokenizer.eos], [*(int(loss_on == "all") for _ in begin), *mask, 1]

    def prompt(self, messages: Sequence[Message], *, tools: Any = None) -> list[int]:
        """The tokens of a conversation for the assistant to continue, including the header of its turn. Raises DataError as `render`."""
        text, _ = self._write(self._marked(list(messages)), self._marked(tools), prompt=True)
        return [token for token, _, _ in self._tokenizer.encode_rendered(text)]

    def end_of_turn(self) -> int:
        """The token with which the assistant ends its turn: the last one whose loss is counted."""
        tokens, counts = self.render([{"role": "user", "content": "?"}, {"role": "assistant", "content": "said"}])
        return [token for token, counted in zip(tokens, counts, strict=True) if counted][-1]

    def _marked(self, value: Any) -> Any:
        """The value with marks around text that is spelled like a control token, lone surrogates replaced, and None values removed."""
        if isinstance(value, str):
            valid = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            return self._controls.sub(rf"{OPEN}\g<0>{CLOSE}", valid)
        if isinstance(value, dict):
            return {self._marked(key): self._marked(each) for key, each in value.items() if each is not None}
        return [self._marked(each) for each in value] if isinstance(value, list) else value

    def _write(self, messages: list[Message], tools: Any, prompt: bool = False) -> tuple[str, list[Span]]:
        """The rendered messages, and the spans that the template marks."""
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        options = {"tools": tools, "chat_template": self.source, "add_generation_prompt": prompt, **self._tokenizer.special_tokens}
        try:
            written: Any = render_jinja_template([messages], return_assistant_tokens_mask=self._has_marks, **options)
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise DataError(f"the chat template (hash {self.hash}) can not render it: {str(error) or type(error).__name__}.") from None
        texts, spans = written
        return texts[0], spans[0] if spans else []

    def _check_tools(self, messages: list[Message], tools: Any, text: str) -> None:
        """Raise DataError if the template writes the same text without the tools, or without the calls of a message: such a call would be
        learned as an empty turn."""
        for i, message in enumerate(messages):
            if message.get("tool_calls"):
                without = {key: value for key, value in message.items() if key != "tool_calls"}
                if self._writes(text, [*messages[:i], without, *messages[i + 1 :]], tools):
                    self._refuse(f"the tool_calls of message {i + 1}, which would be learned as a turn without them")
        if tools and self._writes(text, messages, None):
            self._refuse("the record's tools")

    def _writes(self, text: str, messages: list[Message], tools: Any) -> bool:
        try:
            return self._write(messages, tools)[0] == text
        except DataError:  # it needs what was left out
            return False

    def _refuse(self, ignored: str) -> NoReturn:
        way_out = "Give a --chat_template FILE that writes them, or remove them from the records."
        raise DataError(f"the chat template (hash {self.hash}) ignores {ignored}. {way_out}")

    def _turns(self, messages: list[Message], tools: Any, whole: str, marked: list[Span], wanted: list[int]) -> list[Span]:
        """The spans of the wanted messages, which are the assistant's."""
        if not self._has_marks:
            return [self._turn(messages, i, tools, whole) for i in wanted]
        spans = []
        for i in wanted:
            first, last = [len(self._write(messages[:stop], tools)[1]) if stop else 0 for stop in (i, i + 1)]
            if not first <= last <= len(marked):
                self._cannot_locate(i)
            spans += marked[first:last]
        return spans

    def _turn(self, messages: list[Message], i: int, tools: Any, whole: str) -> Span:
        """The span of the assistant's message i: the text that rendering it adds to the messages before it."""
        before, opened = [self._write(messages[:i], tools, prompt)[0] if i else "" for prompt in (False, True)]
        after, _ = self._write(messages[: i + 1], tools)
        said = str(messages[i].get("content", ""))
        start = len(opened) if len(opened) > len(before) else self._after_header(messages[: i + 1], tools, after, len(before))
        if not (whole.startswith(after) and after.startswith(opened) and after.startswith(before) and start >= 0):
            self._cannot_locate(i)
        return start, start + _turn_length(after[start:], said.rstrip())

    def _cannot_locate(self, i: int) -> NoReturn:
        raise DataError(
            f"the chat template (hash {self.hash}) renders the messages up to number {i + 1} differently when others follow, or "
            "opens the assistant's turn differently than its prompt: what the assistant writes can not be located. "
            "Give a --chat_template FILE that has {% generation %} … {% endgeneration %} around it, or use --loss_on all."
        )

    def _after_header(self, messages: list[Message], tools: Any, after: str, earliest: int) -> int:
        """Where the content of the last message begins in `after`, the rendered messages; -1 if that cannot be determined.

        The messages are rendered again with PROBE as the content: unlike a short content, PROBE cannot occur in the header.
        """
        probed, _ = self._write([*messages[:-1], {**messages[-1], "content": PROBE}], tools)
        start = probed.find(PROBE, earliest)
        said = str(messages[-1].get("content", ""))
        same = start >= 0 and after[:start] == probed[:start]
        return start if same and any(after.startswith(each, start) for each in (said, said.strip())) else -1  # templates may trim


def _set(counts: bytearray, spans: Iterable[Span], value: int) -> None:
    for start, stop in spans:
        counts[start:stop] = bytes([value]) * (stop - start)


def _masked(tokens: Placed, counts: bytearray) -> tuple[list[int], list[int]]:
    """The tokens, and for each 1 if one of its characters counts."""
    return [token for token, _, _ in tokens], [int(1 in counts[start : max(stop, start + 1)]) for _, start, stop in tokens]


def _turn_length(turn: str, said: str) -> int:
    """Number of characters of a turn up to and including its end-of-turn token; white space after it belongs to the layout. If the template
    has no such token, white space ends the turn."""
    stripped = turn.rstrip()
    ends_in_words = stripped.endswith(said) if said else not stripped
    return len(turn) if ends_in_words else len(stripped)
