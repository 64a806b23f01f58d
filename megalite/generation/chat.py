"""A conversation on the terminal, through a chat template.

Every turn reads the whole conversation again: a template may render earlier turns differently later (some
drop the model's reasoning), and reading is fast compared with generating. Rank 0 reads the terminal and
broadcasts the input to all ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from io import TextIOWrapper

from megalite.checkpoint.agreement import on_rank_0
from megalite.data.chat.assistant_turns import Message
from megalite.data.chat.template import ChatTemplate
from megalite.data.indexed import DataError
from megalite.data.tokenizer.tokenizers import Tokenizer
from megalite.generation.language_model import LanguageModel, Sampling
from megalite.generation.text import reply_to


def converse(
    model: LanguageModel,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    count: int,
    sampling: Sampling,
    *,
    ends: Collection[int],
    stops: Sequence[str],
    system: str | None,
    show: Callable[[str], object],
) -> None:
    """Answer the input line by line until it ends.

    When the context of the model is full, the oldest turns are dropped.

    Raises DataError if the template cannot render the conversation.
    """
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # invalid UTF-8 becomes U+FFFD
    beginning = [{"role": "system", "content": system}] if system else []
    turns: list[Message] = []
    with suppress(DataError):  # a template in which the end of a turn cannot be located
        if (end := template.end_of_turn()) is not None:
            ends = {*ends, end}
    while (line := on_rank_0(model.mesh, _line)) is not None:
        if not line.strip():
            continue
        turns.append({"role": "user", "content": line})
        while len(prompt := template.prompt(beginning + turns)) >= model.longest and len(turns) > 1:
            del turns[:2]
        (reply,) = reply_to(model, tokenizer, [prompt], count, sampling, ends=ends, stops=stops, show=show)
        show("\n")
        turns.append({"role": "assistant", "content": reply.text})


def _line() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None
