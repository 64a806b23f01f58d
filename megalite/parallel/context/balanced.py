"""Parts of rows by document, so that attention takes about the same time on every rank.

The functions are pure and do not use torch.

A token only attends to its own document, so that if documents end inside a row, a late part may see few keys.
The cost of a part is the number of tiles of queries by keys that the kernels visit
(`megalite_kernels.attention_part_triton`), not the number of visible pairs: a tile with one visible pair
costs as much as a full one. Rows are cut into blocks of whole tiles; every rank gets the same number of
blocks, with about equal sums of tiles. Every rank computes the same parts from the same rows, so that nothing
is communicated.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from megalite.config.dims import TILE, block_length
from megalite.parallel.context.parts import PositionSegment, PositionSegments, joined

Counts = NDArray[np.int64]
Windows = Sequence[tuple[int | None, int]]
"""Sliding windows of attention (None: all keys), each with the number of layers that use it."""
EVERY_KEY: Windows = ((None, 1),)
KEYS = TILE // 2
"""Keys of a tile of `TILE` queries."""
MOST_SWAPS = 16  # per rank
# of exchanges for a ring, of which those of 2^14 / ranks² pairs are one trial
MOST_TRIALS, MOST_FAILURES, MOST_PAIRS = 256, 8, 1 << 14


def balanced(
    starts: Counts, ranks: int, windows: Windows = EVERY_KEY, method: str = "gather"
) -> list[PositionSegments]:
    """Return the segments of each rank for rows with documents.

    The ranks get the same number of positions, and about the same number of tiles. For a ring, the tiles at
    each hop are about equal too. Rows of one microbatch share their parts, so that tiles are summed over
    them.

    Args:
        starts: [seq, batch], the first position of each position's document.
    """
    length = len(starts)
    block = block_length(length // ranks)
    blocks = [PositionSegment(start, block) for start in range(0, length, block)]
    # Where blocks are shorter than a tile, as in tests, tiles shrink with them: otherwise all would cost the
    # same.
    tiles = visited(blocks, starts, windows, min(TILE, block), max(min(KEYS, block // 2), 1))
    owners = _dealt(tiles.sum(1), ranks)
    _swap(tiles.sum(1), owners, ranks)
    if method == "ring":
        _swap_for_ring(tiles, owners, ranks)
    return [joined([blocks[index] for index in np.flatnonzero(owners == rank)]) for rank in range(ranks)]


def visited(
    segments: Sequence[PositionSegment],
    starts: Counts,
    windows: Windows = EVERY_KEY,
    queries: int = TILE,
    keys: int = KEYS,
) -> Counts:
    """Count the tiles that attention of each segment of queries to each segment of keys visits.

    Tiles begin at the start of their segment and contain queries · keys pairs.

    Args:
        starts: [seq, batch], the first position of each position's document.

    Returns:
        [segments, segments], summed over rows and layers.
    """
    # of each tile of queries
    first = np.array(
        [position for segment in segments for position in range(segment.start, segment.stop, queries)]
    )
    key_start, key_length = (np.array(column) for column in zip(*segments, strict=True))
    # [tiles, segments], counted from the segment's first key
    stop = np.clip(first[:, None] + queries - key_start, 0, key_length)
    total = np.zeros(stop.shape, np.int64)
    for window, layers in windows:
        for document in starts[first].T:  # a row's starts ascend: that of a tile's first query is the least
            lowest = document if window is None else np.maximum(document, first - window + 1)
            begin = np.maximum(lowest[:, None] - key_start, 0)
            total += layers * np.where(begin < stop, -(-stop // keys) - begin // keys, 0)
    tiles = [-(-segment.length // queries) for segment in segments]
    counts: Counts = np.add.reduceat(total, list(accumulate(tiles[:-1], initial=0)), axis=0)
    return counts


def between_ranks(parts: Sequence[PositionSegments], starts: Counts, windows: Windows = EVERY_KEY) -> Counts:
    """Count the tiles that attention of each rank's queries to each rank's keys visits: [ranks, ranks]."""
    tiles = visited([segment for segments in parts for segment in segments], starts, windows)
    first = list(accumulate(map(len, parts[:-1]), initial=0))
    counts: Counts = np.add.reduceat(np.add.reduceat(tiles, first, axis=0), first, axis=1)
    return counts


def imbalance(microbatches: Sequence[Counts], method: str) -> float:
    """Return the time of attention relative to that with equal shares, at least 1.

    With gather it is the time of the slowest rank. In a ring, ranks wait for each other at each hop, so that
    it is the sum of the slowest rank's time over all hops.

    Args:
        microbatches: the tiles of each microbatch, from `between_ranks`.
    """
    ranks = len(microbatches[0])
    slowest = sum(int(_hops(tiles) if method == "ring" else tiles.sum(1).max()) for tiles in microbatches)
    return slowest * ranks / sum(int(tiles.sum()) for tiles in microbatches)


def _hops(tiles: Counts) -> Counts:
    """Sum the tiles of the slowest rank over all hops of a ring: [..., ranks, ranks] -> [...]."""
    rank = np.array(range(tiles.shape[-1]))
    hops: Counts = tiles[..., rank, (rank - rank[:, None]) % len(rank)].max(-1).sum(-1)  # [..., hop, rank]
    return hops


def _dealt(costs: Counts, ranks: int) -> Counts:
    """Assign blocks to ranks, the longest first, each to the least loaded rank that has room."""
    owners = np.empty(len(costs), np.int64)
    # what each has, and how many more it takes
    heap = [(0, rank, len(costs) // ranks) for rank in range(ranks)]
    heapify(heap)
    for block in np.argsort(-costs, kind="stable"):
        load, rank, room = heappop(heap)
        owners[block] = rank
        if room > 1:
            heappush(heap, (load + int(costs[block]), rank, room - 1))
    return owners


def _swap(costs: Counts, owners: Counts, ranks: int) -> None:
    """Exchange blocks in place between the most loaded rank and another one, while that helps."""
    loads = np.bincount(owners, costs, ranks).astype(np.int64)
    for _ in range(MOST_SWAPS * ranks):
        *others, most = np.argsort(loads, kind="stable")
        for other in others:
            gap = loads[most] - loads[other]
            mine, its = np.flatnonzero(owners == most), np.flatnonzero(owners == other)
            moved = costs[mine][:, None] - costs[its]
            # the gap after each exchange
            left = np.where((moved > 0) & (moved < gap), np.abs(gap - 2 * moved), gap)
            best = int(left.argmin())
            if left.flat[best] < gap:
                one, two = mine[best // len(its)], its[best % len(its)]
                owners[one], owners[two] = other, most
                loads[most] -= moved.flat[best]
                loads[other] += moved.flat[best]
                break
        else:
            return


def _swap_for_ring(tiles: Counts, owners: Counts, ranks: int) -> None:
    """Exchange blocks in place to speed up the slowest ranks of the hops of a ring.

    Of a set of random pairs, the best one is exchanged each time. The numbers are drawn from a fixed seed, so
    that all ranks try the same pairs.
    """
    random, one_hot = np.random.default_rng(0), np.eye(ranks, dtype=np.int64)
    held = one_hot[owners]  # [blocks, ranks]
    floats = tiles.astype(np.float64)  # integer matmuls would be slow; these are exact
    # of each block's queries with a rank's keys; vice versa
    queries, keys = ((each @ held).astype(np.int64) for each in (floats, floats.T))
    between, failed = held.T @ queries, 0  # [ranks, ranks]
    for _ in range(MOST_TRIALS):
        a, b = random.integers(len(tiles), size=(2, max(MOST_PAIRS // ranks**2, 16)))
        a, b = (each[owners[a] != owners[b]] for each in (a, b))
        # [pairs, ranks]: what block a adds to the ranks, and b takes away
        moved = one_hot[owners[b]] - one_hot[owners[a]]
        corner = tiles[a, a] - tiles[a, b] - tiles[b, a] + tiles[b, b]
        added = queries[a] - queries[b] + corner[:, None] * moved
        after = (
            between + moved[:, :, None] * added[:, None] + (keys[a] - keys[b])[:, :, None] * moved[:, None]
        )
        best = int(_hops(after).argmin())
        failed += 1
        if _hops(after[best]) < _hops(between):
            one, two, between, failed = a[best], b[best], after[best], 0
            queries += (tiles[:, one] - tiles[:, two])[:, None] * moved[best]
            keys += (tiles[one] - tiles[two])[:, None] * moved[best]
            owners[[one, two]] = owners[[two, one]]
        if failed == MOST_FAILURES:
            return
