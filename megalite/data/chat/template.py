"""Conversations to tokens by a chat template, and which of the tokens the assistant writes.

A template is Jinja source as in Hugging Face tokenizers, rendered as they render it. The assistant's text, up
to and including the token that ends its turn, is located exactly: by the template's {% generation %} marks if
it has them, else by rendering the conversation up to each turn (`megalite.data.chat.assistant_turns`). The
content of a message never becomes a control token, even if it is spelled like one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, NoReturn

from megalite.data.chat.assistant_turns import Message, NotLocated, Span, TemplateLayout, Turn, TurnFinder
from megalite.data.chat.rendering import Renderer
from megalite.data.indexed import DataError
from megalite.data.tokenizer.tokenizers import CLOSE, OPEN, Placed, Tokenizer

DEFAULT_TEMPLATE = Path(__file__).with_name("default.jinja")
"""For tokenizers without a template: <|role|> on a line of its own, the content, and EOS after the
assistant's content."""
LossOn = Literal["assistant", "last", "all"]


def read_template(path: Path) -> str:
    """The Jinja source in a file. Raises DataError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise DataError(
            f"--chat_template {path} cannot be read: {reason}. Give a file with the template's Jinja source."
        ) from None


def template_hash(source: str) -> str:
    """What identifies a template."""
    return sha256(source.encode()).hexdigest()[:16]


class ChatTemplate:
    """The chat template of a tokenizer's model.

    Args:
        source: Jinja source; by default the tokenizer's own template or, if it has none, DEFAULT_TEMPLATE.
        require_end: raise an error where no token ends a turn that counts: a model does not learn from it to
        stop.

    Attributes: `source`, and `hash`, which identifies it.

    Raises:
        DataError: the tokenizer has templates and none of them is the default, as in transformers.
    """

    def __init__(self, tokenizer: Tokenizer, source: str | None = None, *, require_end: bool = False):
        self._tokenizer, self._require_end = tokenizer, require_end
        if source is None and tokenizer.chat_template is None and tokenizer.other_templates:
            raise DataError(
                f"--tokenizer {tokenizer.name} has no default chat template, only "
                f"{', '.join(tokenizer.other_templates)}. "
                "Give the one to use with --chat_template FILE."
            )
        self.source = source or tokenizer.chat_template or DEFAULT_TEMPLATE.read_text(encoding="utf-8")
        self.hash = template_hash(self.source)
        self._name = (
            f"the chat template (hash {self.hash}) {'given for' if source else 'of'} {tokenizer.name}"
        )
        self._renderer = Renderer(self.source, tokenizer.special_tokens, self._name)
        self._controls = re.compile(
            "|".join(map(re.escape, sorted(tokenizer.controls, key=len, reverse=True))) or "(?!)"
        )
        ends = frozenset(tokenizer.ends)
        # BOS ends nothing
        markers = {*tokenizer.controls, *ends} - ({tokenizer.special_tokens.get("bos_token")} - ends)
        self._layout = TemplateLayout(tuple(tokenizer.added), tuple(markers), ends)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Any = None,
        loss_on: LossOn = "assistant",
        without: Collection[int] = (),
    ) -> tuple[list[int], list[int]]:
        """The tokens of a whole conversation, and for each token 1 if its loss is counted, else 0.

        If the marker of the next role ends a turn, it counts with the turn, and one is added after a last
        turn.

        Args:
            messages: each with `role` and `content`, and any other keys that the template reads.
            tools: objects.
            loss_on: the assistant's turns (assistant), its last turn only (last), or everything (all).
            without: numbers of the assistant's messages that do not count.

        Raises:
            DataError: the template cannot render the conversation, ignores its tools or calls, or the
            assistant's turns or, if required,
                their ends cannot be located.
        """
        read = self._read(messages, tools)
        self._check_tools(read)
        turns = [i for i, message in enumerate(read.messages) if message["role"] == "assistant"]
        turns = turns[-1:] if loss_on == "last" else turns
        chosen = [i for i in turns if i not in without]
        counts = bytearray(len(read.text) + 1)  # one per character
        if loss_on == "all":
            _set(counts, [(0, len(read.text))], 1)
            _set(counts, self._spans(read, [i for i in turns if i in without]), 0)
        else:
            every = loss_on == "assistant" and chosen == turns
            _set(counts, self._spans(read, chosen, every=every, require_end=self._require_end), 1)
        return _masked(self._tokenizer.encode_rendered(read.text), counts)

    def pair(
        self, prompt: str, completion: str, *, loss_on: LossOn = "assistant"
    ) -> tuple[list[int], list[int]]:
        """The tokens of a text and its continuation, without a template: BOS if the tokenizer adds it, both
        texts, EOS.

        As `render`, with a mask; the continuation and EOS count, or with `all` everything.
        """
        before, after = self._marked(prompt), self._marked(completion)
        counts = bytearray(len(before) + len(after) + 1)
        _set(counts, [(0 if loss_on == "all" else len(before), len(counts))], 1)
        tokens, mask = _masked(self._tokenizer.encode_rendered(before + after), counts)
        begin = [self._tokenizer.bos] if self._tokenizer.adds_bos and self._tokenizer.bos is not None else []
        return [*begin, *tokens, self._tokenizer.eos], [*(int(loss_on == "all") for _ in begin), *mask, 1]

    def prompt(self, messages: Sequence[Message], *, tools: Any = None) -> list[int]:
        """The tokens of a conversation for the assistant to continue, including the header of its turn.
        Raises DataError as `render`."""
        text, _ = self._renderer.write(self._marked(list(messages)), self._marked(tools), prompt=True)
        return [token for token, _, _ in self._tokenizer.encode_rendered(text)]

    def end_of_turn(self) -> int | None:
        """The token with which the assistant ends its turn: the last one that counts, except for one that
        ends the conversation.

        None if that is no token of its own but text, such as a line break, which the assistant writes within
        a turn, too. Raises DataError as `render`.
        """
        read = self._read([{"role": "user", "content": "?"}, {"role": "assistant", "content": "said"}], None)
        stop = (
            max((stop for _, stop in read.marks), default=0)
            if read.marks is not None
            else self._turn(read, 1).stop
        )
        said = read.text[:stop].rstrip()
        if not said.endswith(self._layout.added):
            return None
        return [token for token, start, _ in self._tokenizer.encode_rendered(read.text) if start < len(said)][
            -1
        ]

    def _marked(self, value: Any) -> Any:
        """The value with marks around text that is spelled like a control token, and lone surrogates
        replaced."""
        if isinstance(value, str):
            valid = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            return self._controls.sub(rf"{OPEN}\g<0>{CLOSE}", valid)
        if isinstance(value, dict):
            return {self._marked(key): self._marked(each) for key, each in value.items()}
        return [self._marked(each) for each in value] if isinstance(value, list) else value

    def _read(self, messages: Sequence[Message], tools: Any) -> _Rendered:
        said, tools = self._marked(list(messages)), self._marked(tools)
        text, marks = self._renderer.write(said, tools)
        finder = TurnFinder(lambda part, prompt: self._renderer.write(part, tools, prompt)[0], self._layout)
        if self._renderer.has_marks:
            return _Rendered(said, tools, text, "", marks, finder)
        end = finder.missing_end(said, text) if said and said[-1]["role"] == "assistant" else ""
        return _Rendered(said, tools, text, end, None, finder)

    def _check_tools(self, read: _Rendered) -> None:
        """Raise DataError if the template writes the same text without the tools, or without the calls of a
        message: such a call would be learned as an empty turn."""
        for i, message in enumerate(read.messages):
            if message.get("tool_calls"):
                without = {key: value for key, value in message.items() if key != "tool_calls"}
                if self._writes(
                    read.written, [*read.messages[:i], without, *read.messages[i + 1 :]], read.tools
                ):
                    self._refuse(
                        f"the tool_calls of message {i + 1}, which would be learned as a turn without them"
                    )
        if read.tools and self._writes(read.written, read.messages, None):
            self._refuse("the record's tools")

    def _writes(self, text: str, messages: list[Message], tools: Any) -> bool:
        try:
            return self._renderer.write(messages, tools)[0] == text
        except DataError:  # it needs what was left out
            return False

    def _refuse(self, ignored: str) -> NoReturn:
        way_out = "Give a --chat_template FILE that writes them, or remove them from the records."
        raise DataError(f"{self._name} ignores {ignored}. {way_out}")

    def _spans(
        self, read: _Rendered, wanted: list[int], *, every: bool = False, require_end: bool = False
    ) -> list[Span]:
        """The spans of the wanted messages, which are the assistant's; with `every`, they are all of its
        messages."""
        if read.marks is None:
            return [span for i in wanted for span in self._turn(read, i, require_end).spans]
        spans = read.marks if every else self._attributed(read, read.marks, wanted)
        if (
            require_end
            and spans
            and not any(read.text[start:stop].rstrip().endswith(self._layout.added) for start, stop in spans)
        ):
            self._cannot_end(wanted[0])
        return spans

    def _attributed(self, read: _Rendered, marks: list[Span], wanted: list[int]) -> list[Span]:
        """The marked spans of the wanted messages."""
        spans = []
        for i in wanted:
            first, last = [
                len(self._renderer.write(read.messages[:stop], read.tools)[1]) if stop else 0
                for stop in (i, i + 1)
            ]
            if not first <= last <= len(marks):
                self._cannot_locate(i)
            spans += marks[first:last]
        return spans

    def _turn(self, read: _Rendered, i: int, require_end: bool = False) -> Turn:
        try:
            turn = read.finder.turn(read.messages, i, read.text)
        except NotLocated:
            self._cannot_locate(i)
        if require_end and not turn.ended:
            self._cannot_end(i)
        return turn

    def _cannot_end(self, i: int) -> NoReturn:
        raise DataError(
            f"{self._name} has no token that ends the assistant's message {i + 1} and counts in the loss: "
            "the model would not learn to "
            "stop. Give a --chat_template FILE that writes eos_token after it, or accept that with "
            "--end_of_turn optional."
        )

    def _cannot_locate(self, i: int) -> NoReturn:
        raise DataError(
            f"{self._name} renders the messages up to number {i + 1} differently when others follow, or "
            "opens the assistant's turn differently than its prompt: what the assistant writes cannot be "
            "located. "
            "Give a --chat_template FILE that has {% generation %} … {% endgeneration %} around it, or use "
            "--loss_on all, or, if only "
            "earlier turns differ, --loss_on last."
        )


@dataclass(frozen=True)
class _Rendered:
    """A conversation as text.

    Attributes:
        messages, tools: with marks around text that is spelled like control tokens.
        written: what the template writes.
        end: the marker that ends the last turn, if the template does not.
        marks: the spans that the template marks; None if it has no marks.
    """

    messages: list[Message]
    tools: Any
    written: str
    end: str
    marks: list[Span] | None
    finder: TurnFinder

    @property
    def text(self) -> str:
        return self.written + self.end


def _set(counts: bytearray, spans: Iterable[Span], value: int) -> None:
    for start, stop in spans:
        counts[start:stop] = bytes([value]) * (stop - start)


def _masked(tokens: Placed, counts: bytearray) -> tuple[list[int], list[int]]:
    """The tokens, and for each 1 if one of its characters counts."""
    return [token for token, _, _ in tokens], [
        int(1 in counts[start : max(stop, start + 1)]) for _, start, stop in tokens
    ]
