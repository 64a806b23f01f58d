"""Positions of a row that each context-parallel rank holds.

The functions are pure and do not use torch. A part is a tuple of segments of consecutive positions, in
ascending order. Every rank holds the same number of positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor


class PositionSegment(NamedTuple):
    """Consecutive positions [start, start + length) of a row."""

    start: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.length


PositionSegments = tuple[PositionSegment, ...]


class SequencePart(NamedTuple):
    """Positions that each context-parallel rank holds of the rows of a microbatch.

    Attributes:
        segments: the segments of every cp rank, which together cover each position of a padded row once.
        rank: this rank's index among them.
        length: positions of a row, without the padding at its end.
        document_start: [padded row, batch], of the whole rows; None if each row is one document.
        tiles: [ranks, ranks], the attention tiles of each rank's queries and each rank's keys
            (`balanced.between_ranks`); None if they are not counted.
    """

    segments: Sequence[PositionSegments]
    rank: int
    length: int
    document_start: Tensor | None
    tiles: NDArray[np.int64] | None = None


def contiguous(length: int, ranks: int) -> list[PositionSegments]:
    """Assign the r-th of `ranks` equal parts to rank r."""
    each = _equal(length, ranks)
    return [(PositionSegment(rank * each, each),) for rank in range(ranks)]


def zigzag(length: int, ranks: int) -> list[PositionSegments]:
    """Assign parts r and 2·ranks − 1 − r of 2·ranks equal parts to rank r.

    In one long document every rank has the same number of visible pairs.
    """
    each = _equal(length, 2 * ranks)
    return [
        (PositionSegment(rank * each, each), PositionSegment((2 * ranks - 1 - rank) * each, each))
        for rank in range(ranks)
    ]


PARTS = {"ulysses": contiguous, "gather": zigzag, "ring": zigzag}
"""Parts of each method. Ulysses attends over whole rows, and is balanced with any parts."""


def split(parts: Sequence[PositionSegments], ranks: int) -> list[PositionSegments]:
    """Split each part into equal consecutive pieces for `ranks` ranks."""
    return [_slice(segments, rank, ranks) for segments in parts for rank in range(ranks)]


def _slice(segments: PositionSegments, rank: int, ranks: int) -> PositionSegments:
    length, before, piece = _equal(sum(segment.length for segment in segments), ranks), 0, []
    for segment in segments:
        begin, stop = (
            min(max(edge - before, 0), segment.length) for edge in (rank * length, (rank + 1) * length)
        )
        if begin < stop:
            piece.append(PositionSegment(segment.start + begin, stop - begin))
        before += segment.length
    return tuple(piece)


@lru_cache(maxsize=64)
def grouped(parts: tuple[PositionSegments, ...], ranks: int) -> list[PositionSegments]:
    """Return the segments that each group of `ranks` neighbors holds together, the inverse of `split`."""
    return [
        joined(segment for segments in parts[first : first + ranks] for segment in segments)
        for first in range(0, len(parts), ranks)
    ]


def joined(segments: Iterable[PositionSegment]) -> PositionSegments:
    """Merge adjacent segments, which must be in ascending order."""
    merged: list[PositionSegment] = []
    for segment in segments:
        if merged and merged[-1].stop == segment.start:
            merged[-1] = PositionSegment(merged[-1].start, merged[-1].length + segment.length)
        else:
            merged.append(segment)
    return tuple(merged)


def _equal(length: int, parts: int) -> int:
    if length % parts:
        raise ValueError(f"Expected a row length divisible by {parts}, but got {length}. Pad the row first.")
    return length // parts


def ring_order(rank: int, ranks: int) -> Iterator[int]:
    """Yield the ranks whose parts reach `rank` around a ring, hop by hop, starting with its own."""
    return ((rank - hop) % ranks for hop in range(ranks))


def sees(queries: Sequence[tuple[int, int]], keys: Sequence[tuple[int, int]], window: int | None) -> bool:
    """Return whether any of the queries sees any of the keys, ignoring documents.

    Key j is visible from query i if j ≤ i and i − j < window.
    """
    pairs = ((PositionSegment(*query), PositionSegment(*key)) for query in queries for key in keys)
    return any(
        key.start < query.stop and (window is None or query.start - (key.stop - 1) < window)
        for query, key in pairs
    )
