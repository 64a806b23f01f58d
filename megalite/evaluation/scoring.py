"""Log-probabilities of given tokens, from which every measure here is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megalite.generation.language_model import LanguageModel

Progress = Callable[[int, int], None]  # rows done, rows in all


class Row(NamedTuple):
    """Tokens of which the last ones, `scored` in number, are scored, each given all before it. The last one never enters the model."""

    tokens: Sequence[int]
    scored: int


@dataclass(frozen=True)
class Score:
    """The log-probability (natural logarithm) of a row's scored tokens together, and whether each is the most likely one at its place."""

    log_probability: float
    greedy: bool


def score(model: LanguageModel, rows: Sequence[Row], batch_size: int, progress: Progress | None = None) -> list[Score]:
    """The rows' scores, in their order; sums are taken in fp64. Collective over the model's ranks, with the same rows on each.

    Rows that differ in their last token alone, as answers of one token to a question do, go through the model once. Batches are made of
    rows of similar length, the longest first: little is padded, and where memory does not suffice, that shows at once.
    """
    sharing: dict[tuple[int, ...], list[int]] = {}
    for number, row in enumerate(rows):
        sharing.setdefault(tuple(row.tokens[:-1]), []).append(number)
    inputs = sorted(sharing, key=len, reverse=True)
    found: dict[int, Score] = {}
    for start in range(0, len(inputs), batch_size):
        batch = inputs[start : start + batch_size]
        members = [(column, number) for column, each in enumerate(batch) for number in sharing[each]]
        found |= _score_batch(model, batch, {number: column for column, number in members}, rows)
        if progress is not None:
            progress(len(found), len(rows))
    return [found[number] for number in range(len(rows))]


def _score_batch(model: LanguageModel, inputs: list[tuple[int, ...]], columns: dict[int, int], rows: Sequence[Row]) -> dict[int, Score]:
    """columns: the number of each row that is scored → the place of its inputs in the batch."""
    places, targets = [], list[int]()
    for number, column in columns.items():
        tokens, count = rows[number]
        places += [(position, column) for position in range(len(tokens) - 1 - count, len(tokens) - 1)]
        targets += tokens[len(tokens) - count :]
    values, greedy = model.log_probabilities(inputs, places, targets)
    counts = [rows[number].scored for number in columns]
    parts = zip(values.double().split(counts), greedy.split(counts), strict=True)
    return {number: Score(value.sum().item(), bool(best.all())) for number, (value, best) in zip(columns, parts, strict=True)}
