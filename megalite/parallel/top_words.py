"""The most probable words of a teacher's distributions."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class TopWords(NamedTuple):
    """The most probable words of a teacher's distributions at a temperature.

    Attributes:
        words: int32 or int64, [..., k].
        log_p: their log-probabilities, of the softmax over the whole vocabulary, [..., k].
        rest: the probability of all other words together, [...]; 0 if there are none.
    """

    words: Tensor
    log_p: Tensor
    rest: Tensor
