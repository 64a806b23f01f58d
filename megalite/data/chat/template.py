"""Tokenization of conversations with a chat template, and the weights of the tokens in the loss.

A template is Jinja source as in Hugging Face tokenizers, rendered as they render it. The assistant's text, up
to and including the token that ends its turn, is located exactly: by the template's {% generation %} marks if
it has them, else by rendering the conversation up to each turn (`megalite.data.chat.assistant_turns`). The
content of a message never becomes a control token, even if it is spelled like one.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from os.path import commonprefix
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NoReturn

from megalite.data.chat.assistant_turns import Message, NotLocated, Span, TemplateLayout, Turn, TurnFinder
from megalite.data.chat.rendering import Renderer
from megalite.data.indexed import DataError
from megalite.data.tokenizer.tokenizers import CLOSE, OPEN, Placed, Tokenizer

DEFAULT_TEMPLATE = Path(__file__).with_name("default.jinja")
"""Template for tokenizers without one: <|role|> on a separate line, the content, and EOS after the assistant.
"""
LossOn = Literal["assistant", "last", "all"]


def read_template(path: Path) -> str:
    """Return the Jinja source in a file. Raises DataError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise DataError(
            f"Could not read --chat_template {path}: {reason}. Expected a UTF-8 file with a Jinja template."
        ) from None


def template_hash(source: str) -> str:
    """Return the hash that identifies a template."""
    return sha256(source.encode()).hexdigest()[:16]


class ChatTemplate:
    """The chat template of a tokenizer's model.

    Args:
        source: Jinja source; by default the tokenizer's own template or, if it has none, DEFAULT_TEMPLATE.
        require_end: raise an error if no token ends a turn with loss: the model would not learn to stop.

    Attributes:
        source: Jinja source.
        hash: identifies the template.

    Raises:
        DataError: the tokenizer has templates, but no default one, as in transformers.
    """

    def __init__(self, tokenizer: Tokenizer, source: str | None = None, *, require_end: bool = False):
        self._tokenizer, self._require_end = tokenizer, require_end
        if source is None and tokenizer.chat_template is None and tokenizer.other_templates:
            raise DataError(
                f"--tokenizer {tokenizer.name} has several chat templates "
                f"({', '.join(tokenizer.other_templates)}) but no default one. Choose one with "
                "--chat_template FILE."
            )
        self.source = source or tokenizer.chat_template or DEFAULT_TEMPLATE.read_text(encoding="utf-8")
        self.hash = template_hash(self.source)
        self._name = (
            f"the chat template (hash {self.hash}) {'passed for' if source else 'of'} {tokenizer.name}"
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
        weights: Mapping[int, float] = MappingProxyType({}),
    ) -> tuple[list[int], list[float]]:
        """Return the tokens of a conversation and the weights of their losses, which are 0 or 1 by default.

        If the marker of the next role ends a turn, it counts with the turn, and one is added after a last
        turn.

        Args:
            messages: each with `role` and `content`, and any other keys that the template reads.
            tools: objects.
            loss_on: the assistant's turns (assistant), its last turn only (last), or everything (all).
            weights: numbers of messages of the assistant → weight of their tokens.

        Raises:
            DataError: the template cannot render the conversation, ignores its tools or calls, or the
                assistant's turns or, if required, their ends cannot be located.
        """
        read = self._read(messages, tools)
        self._check_tools(read.messages, read.tools, read.written)
        turns = [i for i, message in enumerate(read.messages) if message["role"] == "assistant"]
        turns = turns[-1:] if loss_on == "last" else turns
        chosen = [i for i in turns if weights.get(i, 1) != 0]
        characters = CharacterWeights(len(read.text))
        if loss_on == "all":
            characters.set([(0, len(read.text))], 1)
            characters.set(self._spans(read, [i for i in turns if i not in chosen]), 0)
        else:
            every = loss_on == "assistant" and chosen == turns
            characters.set(self._spans(read, chosen, every=every, require_end=self._require_end), 1)
        for i in chosen:
            if (weight := weights.get(i, 1)) != 1:
                characters.set(self._spans(read, [i]), weight)
        placed = self._tokenizer.encode_rendered(read.text)
        return [token for token, _, _ in placed], characters.of_tokens(placed)

    def pair(
        self, prompt: str, completion: str, *, loss_on: LossOn = "assistant"
    ) -> tuple[list[int], list[float]]:
        """Tokenize a text and its continuation without a template.

        The tokens are BOS, if the tokenizer adds it, both texts, and EOS.

        As `render`, with weights; the continuation and EOS count, or with `all` everything.
        """
        before, after = self._marked(prompt), self._marked(completion)
        characters = CharacterWeights(len(before) + len(after))
        characters.set([(0 if loss_on == "all" else len(before), len(before) + len(after) + 1)], 1)
        placed = self._tokenizer.encode_rendered(before + after)
        tokens, begin = [token for token, _, _ in placed], self._begin
        ends = [*(int(loss_on == "all") for _ in begin), *characters.of_tokens(placed), 1]
        return [*begin, *tokens, self._tokenizer.eos], ends

    def with_completions(
        self,
        prompt: str | Sequence[Message],
        completions: Sequence[str | Sequence[Message]],
        *,
        tools: Any = None,
    ) -> tuple[list[list[int]], int]:
        """Tokenize a prompt with each of its completions as TRL does.

        Texts are tokenized without the template, and EOS ends them. A completion begins where the tokens of
        the prompt alone, up to the header of the assistant's next turn, and the tokens of the prompt with a
        completion differ for the first time.

        Returns:
            The tokens of the prompt with each completion, and the number of leading ones that are the
            prompt's.

        Raises:
            DataError: as `render`.
        """
        if isinstance(prompt, str):
            alone = self._plain(prompt)
            # a completion may end with the name of EOS
            end = self._tokenizer.special_tokens["eos_token"]
            whole = [
                [*self._plain(prompt + str(each).removesuffix(end)), self._tokenizer.eos]
                for each in completions
            ]
        else:
            alone = self.prompt(prompt, tools=tools)
            whole = [self._conversation([*prompt, *each], tools) for each in completions]
        same = [len(commonprefix([alone, tokens])) for tokens in whole]
        return whole, min(same)

    def _plain(self, text: str) -> list[int]:
        """Return the tokens of a text without a template."""
        return [
            *self._begin,
            *(token for token, _, _ in self._tokenizer.encode_rendered(self._marked(text))),
        ]

    def _conversation(self, messages: Sequence[Message], tools: Any) -> list[int]:
        """Return the tokens of a conversation as the template writes it."""
        said, tools = self._marked(list(messages)), self._marked(tools)
        text, _ = self._renderer.write(said, tools)
        self._check_tools(said, tools, text)
        return [token for token, _, _ in self._tokenizer.encode_rendered(text)]

    @property
    def _begin(self) -> list[int]:
        """Return the tokens before a text without a template."""
        bos = self._tokenizer.bos
        return [bos] if self._tokenizer.adds_bos and bos is not None else []

    def prompt(self, messages: Sequence[Message], *, tools: Any = None) -> list[int]:
        """Tokenize a conversation up to the header of the assistant's next turn.

        Raises DataError as `render`.
        """
        text, _ = self._renderer.write(self._marked(list(messages)), self._marked(tools), prompt=True)
        return [token for token, _, _ in self._tokenizer.encode_rendered(text)]

    def end_of_turn(self) -> int | None:
        """Return the token that ends the assistant's turn, not the conversation.

        None if text ends the turn, such as a line break, which can also be within a turn. Raises DataError as
        `render`.
        """
        read = self._read([{"role": "user", "content": "?"}, {"role": "assistant", "content": "said"}], None)
        stop = (
            max((stop for _, stop in read.marks), default=0)
            if read.marks is not None
            else self._turn(read, 1).stop
        )
        text = read.text[:stop].rstrip()
        if not text.endswith(self._layout.added):
            return None
        placed = self._tokenizer.encode_rendered(read.text)
        return [token for token, start, _ in placed if start < len(text)][-1]

    def _marked(self, value: Any) -> Any:
        """Replace lone surrogates, and enclose text that is spelled like a control token in marks."""
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

    def _check_tools(self, messages: list[Message], tools: Any, written: str) -> None:
        """Raise DataError if the template ignores the tools, or the tool calls of a message.

        It does if it writes the same text without them: a call would be trained on as an empty turn.
        """
        for i, message in enumerate(messages):
            if message.get("tool_calls"):
                without = {key: value for key, value in message.items() if key != "tool_calls"}
                if self._writes(written, [*messages[:i], without, *messages[i + 1 :]], tools):
                    self._refuse(
                        f"the tool_calls of message {i + 1}, so the model would be trained on an empty turn"
                    )
        if tools and self._writes(written, messages, None):
            self._refuse("the record's tools")

    def _writes(self, text: str, messages: list[Message], tools: Any) -> bool:
        try:
            return self._renderer.write(messages, tools)[0] == text
        except DataError:  # it needs what was left out
            return False

    def _refuse(self, ignored: str) -> NoReturn:
        way_out = "Use a --chat_template FILE that supports them, or remove them from the records."
        raise DataError(f"{self._name} ignores {ignored}. {way_out}")

    def _spans(
        self, read: _Rendered, wanted: list[int], *, every: bool = False, require_end: bool = False
    ) -> list[Span]:
        """Return the spans of the wanted messages of the assistant, or with `every` of all its messages."""
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
        """Return the marked spans of the wanted messages."""
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
            f"{self._name} does not end the assistant's message {i + 1} with a token that is trained on, so "
            "the model would not learn to stop. Use a --chat_template FILE that writes eos_token after it, "
            "or pass --end_of_turn optional to train anyway."
        )

    def _cannot_locate(self, i: int) -> NoReturn:
        raise DataError(
            f"Could not locate the assistant's message {i + 1} in the output of {self._name}: the template "
            "renders earlier messages differently when others follow, or its generation prompt differs "
            "from the start of the turn. Use a --chat_template FILE with {% generation %} … {% "
            "endgeneration %} around the assistant's messages, or --loss_on all. If only earlier turns "
            "differ, --loss_on last also works."
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


class CharacterWeights:
    """The weights of the characters of a text and of the position after it, 0 until they are set.

    Of a token with several characters, the first one that counts decides.
    """

    def __init__(self, length: int):
        self._values: list[float] = [0, 1]
        self._numbers = array("i", bytes(array("i").itemsize * (length + 1)))  # in `_values`, by character

    def set(self, spans: Iterable[Span], weight: float) -> None:
        if weight not in self._values:
            self._values.append(weight)
        number = self._values.index(weight)
        for start, stop in spans:
            self._numbers[start:stop] = array("i", [number]) * (stop - start)

    def of_tokens(self, tokens: Placed) -> list[float]:
        return [
            self._values[next(filter(None, self._numbers[start : max(stop, start + 1)]), 0)]
            for _, start, stop in tokens
        ]
