"""Sequences: the documents of preferences in a microbatch."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Sequences(NamedTuple):
    """The documents of a microbatch of preferences, each a prompt and its completion.

    They are numbered row after row, and in a row by position. Of pairs, documents 2i and 2i + 1 are the
    chosen and the rejected one of a pair, which are in one row.

    Attributes:
        index: [seq, batch] int64, the number of each token's document; −1 for padding.
        completion: [seq, batch] bool, whether the target is a token of the completion, its end included.
        documents: [count] int64, the ordinal of each document in its data set.
        labels: [count] int64, 1 for a chosen or good completion, 0 for a rejected or bad one.
        count: number of documents, on the host.
        tokens: [2, count] fp64, the number of targets in prompts and in completions of whole rows; None until
            counted (`model.objective.counting`).
        factors: for each term of the objective, the number of tokens of the global batch whose loss counts,
            divided by what the term is divided by; empty until known.
        reference: [count] fp64, the log-probabilities of the completions in the reference model; None on
            ranks without the head, or without a reference.
        baseline: [] fp64, the mean log-ratio of mismatched sequences of the global batch, at least 0; None on
            ranks without the head, or if the objective does not need it.
    """

    index: Tensor  # type: ignore[assignment]  # instead of the method of tuples
    completion: Tensor
    documents: Tensor
    labels: Tensor
    count: int  # type: ignore[assignment]
    tokens: Tensor | None = None
    factors: tuple[float, ...] = ()
    reference: Tensor | None = None
    baseline: Tensor | None = None
