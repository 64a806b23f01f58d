"""Which positions of a row each context-parallel rank holds. Pure functions; no torch.

A part is a list of runs of consecutive positions, (start, length) each, in ascending order. The ranks hold
equally many positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor


class PositionSegment(NamedTuple):
    start: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.length


Runs = tuple[PositionSegment, ...]


class SequencePart(NamedTuple):
    """What a context-parallel rank holds of the rows of a microbatch, and what the others hold.

    Attributes:
        runs: those of every cp rank, which together have each position of a padded row once.
        rank: this rank's index among them.
        length: positions of a row, without the padding at its end.
        document_start: [padded row, batch], of the whole rows; None: each is one document. tiles: of
        attention, those of each rank's queries that visit each rank's keys (`balanced.between_ranks`); None:
        not counted.
    """

    runs: Sequence[Runs]
    rank: int
    length: int
    document_start: Tensor | None
    tiles: NDArray[np.int64] | None = None


def contiguous(length: int, ranks: int) -> list[Runs]:
    """Rank r holds the r-th of `ranks` equal parts."""
    each = _equal(length, ranks)
    return [(PositionSegment(rank * each, each),) for rank in range(ranks)]


def zigzag(length: int, ranks: int) -> list[Runs]:
    """Rank r holds parts r and 2·ranks − 1 − r of 2·ranks equal ones: of one long document every rank has
    equally many visible pairs."""
    each = _equal(length, 2 * ranks)
    return [
        (PositionSegment(rank * each, each), PositionSegment((2 * ranks - 1 - rank) * each, each))
        for rank in range(ranks)
    ]


PARTS = {"ulysses": contiguous, "gather": zigzag, "ring": zigzag}
"""The parts of each method. Ulysses attends over whole rows, and is balanced with any."""


def split(parts: Sequence[Runs], ranks: int) -> list[Runs]:
    """Each part as those of `ranks` ranks, which hold equal pieces of it one after the other."""
    return [_slice(runs, rank, ranks) for runs in parts for rank in range(ranks)]


def _slice(runs: Runs, rank: int, ranks: int) -> Runs:
    each, before, found = _equal(sum(run.length for run in runs), ranks), 0, []
    for run in runs:
        begin, stop = (min(max(edge - before, 0), run.length) for edge in (rank * each, (rank + 1) * each))
        if begin < stop:
            found.append(PositionSegment(run.start + begin, stop - begin))
        before += run.length
    return tuple(found)


@lru_cache(maxsize=64)
def grouped(parts: tuple[Runs, ...], ranks: int) -> list[Runs]:
    """The inverse of `split`: what `ranks` neighbours hold together."""
    return [
        joined(run for runs in parts[first : first + ranks] for run in runs)
        for first in range(0, len(parts), ranks)
    ]


def joined(runs: Iterable[PositionSegment]) -> Runs:
    """Ascending runs, of which neighbours become one."""
    found: list[PositionSegment] = []
    for run in runs:
        if found and found[-1].stop == run.start:
            found[-1] = PositionSegment(found[-1].start, found[-1].length + run.length)
        else:
            found.append(run)
    return tuple(found)


def _equal(length: int, parts: int) -> int:
    if length % parts:
        raise ValueError(f"a row of {length} positions has no {parts} equal parts: it must be padded first")
    return length // parts


def sees(queries: Sequence[tuple[int, int]], keys: Sequence[tuple[int, int]], window: int | None) -> bool:
    """Whether any of the queries sees any of the keys, documents aside: key j is visible from query i if j ≤
    i and i − j < window."""
    pairs = ((PositionSegment(*query), PositionSegment(*key)) for query in queries for key in keys)
    return any(
        key.start < query.stop and (window is None or query.start - (key.stop - 1) < window)
        for query, key in pairs
    )
