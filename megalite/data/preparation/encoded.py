"""The result of encoding a task, of texts, conversations or preferences."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.data.chat.records import BadRecord


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the token type that Megatron-LM chooses: uint16 if the vocabulary fits, otherwise int32."""
    return np.dtype("<u2" if vocab_size < 65500 else "<i4")


def _none() -> NDArray[np.int32]:
    return np.empty(0, np.int32)


@dataclass
class Encoded:
    """The tokenized documents of a task.

    Attributes:
        tokens: tokens of all documents, concatenated. A text ends with EOS, a conversation as its template
            ends it.
        sizes: number of tokens of each document.
        continues: the first entry continues the last document of the previous task.
        mask: 1 for each token whose loss is counted, 0 for others; the weights of the tokens as float32 if
            messages have weights other than 0 and 1; for preferences CHOSEN or REJECTED for each token of a
            completion (`megalite.data.indexed`); None if all are counted.
        empty, too_long, without_loss: number of documents that were dropped because they have no text, exceed
            the maximum length, or have no token with loss.
        shortest_too_long: the smallest maximum length with which one that exceeds it would fit; 0: none does.
        replaced: number of documents with bytes that are not valid UTF-8.
        bad, bad_first: number of bad records that were skipped, and the first of them.
        forms: formats of the conversations.
        chosen, rejected: number of documents of preferences that are chosen or good, rejected or bad.
        equal: number of pairs whose documents are equal.
    """

    input_bytes: int
    tokens: NDArray[np.integer] = field(default_factory=_none)
    sizes: NDArray[np.int32] = field(default_factory=_none)
    continues: bool = False
    mask: NDArray[np.uint8 | np.float32] | None = None
    empty: int = 0
    replaced: int = 0
    too_long: int = 0
    shortest_too_long: int = 0
    without_loss: int = 0
    bad: int = 0
    bad_first: list[BadRecord] = field(default_factory=list)
    forms: set[str] = field(default_factory=set)
    chosen: int = 0
    rejected: int = 0
    equal: int = 0

    def add_too_long(self, length: int) -> None:
        """Count a conversation or preference of `length` tokens, which exceeds the maximum length."""
        self.too_long += 1
        self.shortest_too_long = min(self.shortest_too_long or length, length)
