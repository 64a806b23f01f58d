"""Log-probabilities of given tokens, from which all measures of this package are computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megalite.generation.language_model import LanguageModel

Progress = Callable[[int, int], None]  # rows done, rows in all


class ScoredTokens(NamedTuple):
    """A row of tokens and the number at its end (`scored`) to score, each given all tokens before it.

    The last token is never an input of the model.
    """

    tokens: Sequence[int]
    scored: int


@dataclass(frozen=True)
class Score:
    """The score of a row.

    The log-probability (natural logarithm) of its scored tokens, and whether each token is the most likely
    one.
    """

    log_probability: float
    greedy: bool


def score(
    model: LanguageModel, rows: Sequence[ScoredTokens], batch_size: int, progress: Progress | None = None
) -> list[Score]:
    """Score the rows, in order, summed in fp64.

    Collective over the ranks of the model, with the same rows on each.

    Rows that differ only in their last token, as one-token answers to a question, share one pass through the
    model. Batches have rows of similar length, the longest first: padding is small, and if memory does not
    suffice, the first batch fails.
    """
    sharing: dict[tuple[int, ...], list[int]] = {}
    for number, row in enumerate(rows):
        sharing.setdefault(tuple(row.tokens[:-1]), []).append(number)
    inputs = sorted(sharing, key=len, reverse=True)
    scores: dict[int, Score] = {}
    for start in range(0, len(inputs), batch_size):
        batch = inputs[start : start + batch_size]
        members = [(column, number) for column, prefix in enumerate(batch) for number in sharing[prefix]]
        scores |= _score_batch(model, batch, {number: column for column, number in members}, rows)
        if progress is not None:
            progress(len(scores), len(rows))
    return [scores[number] for number in range(len(rows))]


def _score_batch(
    model: LanguageModel, inputs: list[tuple[int, ...]], columns: dict[int, int], rows: Sequence[ScoredTokens]
) -> dict[int, Score]:
    """Score one batch.

    Args:
        columns: the index of a row → the column of its inputs in the batch.
    """
    places, targets = [], list[int]()
    for number, column in columns.items():
        tokens, count = rows[number]
        places += [(position, column) for position in range(len(tokens) - 1 - count, len(tokens) - 1)]
        targets += tokens[len(tokens) - count :]
    values, greedy = model.log_probabilities(inputs, places, targets)
    counts = [rows[number].scored for number in columns]
    parts = zip(values.double().split(counts), greedy.split(counts), strict=True)
    return {
        number: Score(value.sum().item(), bool(best.all()))
        for number, (value, best) in zip(columns, parts, strict=True)
    }
