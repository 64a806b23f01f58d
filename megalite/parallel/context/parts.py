"""Which positions of a row each context-parallel rank holds. Pure functions; no torch.

A part is a list of runs of consecutive positions, (start, length) each, in ascending order. The ranks hold equally many positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor


class Run(NamedTuple):
    start: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.length


Runs = tuple[Run, ...]


class Part(NamedTuple):
    """What a context-parallel rank holds of the rows of a microbatch, and what the others hold.

    Attributes:
        runs: those of every cp rank, which together have each position of a padded row once.
        rank: this rank's index among them.
        length: positions of a row, without the padding at its end.
        document_start: [padded row, batch], of the whole rows; None: each is one document.
        tiles: of attention, those of each rank's queries that visit each rank's keys (`balanced.between_ranks`); None: not counted.
    """

    runs: Sequence[Runs]
    rank: int
    length: int
    document_start: Tensor | None
    tiles: NDArray[np.int64] | None = None


def contiguous(length: int, ranks: int) -> list[Runs]:
    """Rank r holds the r-th of `ranks` equal parts."""
    each = _equal(length, ranks)
    return [(Run(rank * each, each),) for rank in range(ranks)]


def zigzag(length: int, ranks: int) -> list[Runs]:
    """Rank r holds parts r and 2·ranks − 1 − r of 2·ranks equal ones: of one long document every rank has equally many visible pairs."""
    each = _equal(length, 2 * ranks)
    return [(Run(rank * each, each), Run((2 * ranks - 1 - rank) * each, each)) for rank in range(ranks)]


PARTS = {"ulysses": contiguous, "gather": zigzag, "ring": zigzag}
"""The parts of each method. Ulysses attends over whole rows, and is balanced with any."""


def _equal(length: int, parts: int) -> int:
    if length % parts:
        raise ValueError(f"a row of {length} positions has no {parts} equal parts: it must be padded first")
    return length // parts


def sees(queries: Sequence[tuple[int, int]], keys: Sequence[tuple[int, int]], window: int | None) -> bool:
    """Whether any of the queries sees any of the keys, documents aside: key j is visible from query i if j ≤ i and i − j < window."""
    pairs = ((Run(*query), Run(*key)) for query in queries for key in keys)
    return any(key.start < query.stop and (window is None or query.start - (key.stop - 1) < window) for query, key in pairs)
