"""What a worker makes of a task, whether of texts or of conversations."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


def _none() -> NDArray[np.int32]:
    return np.empty(0, np.int32)


@dataclass
class Encoded:
    """A task's documents as tokens.

    Attributes:
        tokens: of all documents, one after another; a text ends in EOS, a conversation as its template ends it.
        sizes: the tokens of each document.
        mask: of each token whether its loss counts; None where all do.
        empty, too_long, without_loss: documents without text, longer than is wanted, and with nothing to learn from.
        replaced: documents that held bytes that are no UTF-8.
        forms: in which conversations came.
    """

    input_bytes: int
    tokens: NDArray[np.integer] = field(default_factory=_none)
    sizes: NDArray[np.int32] = field(default_factory=_none)
    mask: NDArray[np.uint8] | None = None
    empty: int = 0
    replaced: int = 0
    too_long: int = 0
    without_loss: int = 0
    forms: set[str] = field(default_factory=set)
