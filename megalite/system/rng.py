"""Random numbers keyed by their purpose, not by the rank that draws them: the same numbers under every mesh.

Initial weights are drawn on the CPU in blocks of rows, each from a generator keyed by (seed, segment name,
block). A rank draws the blocks that it keeps a part of, several at a time, and keeps its part. (Dropout's
keyed mask is in the kernels.)
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from math import prod
from threading import stack_size
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megalite.mesh.layout import Coordinates
    from megalite.parallel.spec import LocalPart, Segment

BLOCK_ROWS = 128  # never change it: another value would draw other weights from the same seed
MOST_THREADS = 8  # six draw as fast as one writes what they have drawn
STACK = 1 << 19  # bytes

_T = TypeVar("_T")


def key(*parts: int | str) -> int:
    """Return a 63-bit number that depends on every part and on their order."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def normal(shape: tuple[int, ...], *parts: int | str) -> Tensor:
    """Return samples of normal(0, 1) with the key of `parts`, fp32, on the CPU."""
    return normal_(torch.empty(shape), *parts)


def normal_(numbers: Tensor, *parts: int | str) -> Tensor:
    """Fill an fp32 tensor on the CPU with the samples of `normal`."""
    return numbers.normal_(generator=torch.Generator().manual_seed(key(*parts)))


def uniform_(numbers: Tensor, *parts: int | str) -> Tensor:
    """Fill an fp32 tensor on the CPU with samples of the uniform distribution in [0, 1)."""
    return numbers.uniform_(generator=torch.Generator().manual_seed(key(*parts)))


class Draw(NamedTuple):
    """The random draw that initializes a range of a segment on a rank.

    Attributes:
        first: the first element, counted in the rank's local shape, flat.
        shape: of the numbers to draw.
        fill: draws them into a tensor. May be called on any thread, of which it uses one core.
        values: of these numbers the range's values, flat, fp32. Called where all cores may be used.
    """

    first: int
    shape: tuple[int, ...]
    fill: Callable[[Tensor], Tensor]
    values: Callable[[Tensor], Tensor]


def initial_values(segment: Segment, at: Coordinates, seed: int, low: int, high: int) -> Iterator[Draw]:
    """Yields the draws that initialize elements [low, high) of a segment on the rank at these coordinates.

    Elements are counted in its flattened local shape, in order.

    The ranges are whole rows of a block, so the first and the last may reach beyond [low, high). Padding is
    zero.
    """
    part = segment.local(at)
    width = prod(part.shape[1:])
    if low >= high:
        return
    if segment.initial is None and segment.init_std == 0.0:
        yield Draw(low, (0,), lambda none: none, lambda _: torch.full((high - low,), segment.init_value))
        return
    start, end = part.offsets[0], part.offsets[0] + part.sizes[0]
    # rows of the global tensor, or of its padding
    first, last = start + low // width, start + -(-high // width)
    for rows in block_rows(first, min(last, end)):
        fill, values = partial(_fill, segment, rows, seed), partial(_local_rows, segment, part, rows)
        yield Draw((rows.start - start) * width, _block_shape(segment, rows), fill, values)
    if last > max(first, end):
        padding = (last - max(first, end)) * width
        yield Draw((max(first, end) - start) * width, (0,), lambda none: none, lambda _: torch.zeros(padding))


def _block_shape(segment: Segment, rows: range) -> tuple[int, ...]:
    """Return the shape of the block with these rows."""
    return (min(BLOCK_ROWS, segment.shape[0] - rows.start + rows.start % BLOCK_ROWS), *segment.shape[1:])


def _fill(segment: Segment, rows: range, seed: int, numbers: Tensor) -> Tensor:
    draw = normal_ if segment.initial is None else uniform_
    return draw(numbers, seed, segment.name, rows.start // BLOCK_ROWS)


def _rows(segment: Segment, rows: range, numbers: Tensor) -> Tensor:
    first = rows.start % BLOCK_ROWS
    if segment.initial is None:
        return numbers[first : first + len(rows)].mul_(segment.init_std)
    # of the whole block: the same operations on every rank
    index = torch.arange(rows.start - first, rows.start - first + len(numbers), dtype=torch.float64)
    index = index.view(-1, *(1 for _ in numbers.shape[1:]))
    return segment.initial.values(1 - numbers.double(), index)[first : first + len(rows)].float()


def _local_rows(segment: Segment, part: LocalPart, rows: range, numbers: Tensor) -> Tensor:
    drawn = _rows(segment, rows, numbers)
    if part.sizes[1:] == part.shape[1:] == segment.shape[1:]:
        return drawn.flatten()
    columns = tuple(
        slice(offset, offset + size) for offset, size in zip(part.offsets[1:], part.sizes[1:], strict=True)
    )
    values = torch.zeros(len(rows), *part.shape[1:])
    values[(slice(None), *(slice(0, size) for size in part.sizes[1:]))] = drawn[(slice(None), *columns)]
    return values.flatten()


def block_rows(start: int, stop: int) -> Iterator[range]:
    """Split rows [start, stop) at block boundaries."""
    while start < stop:
        end = min(start - start % BLOCK_ROWS + BLOCK_ROWS, stop)
        yield range(start, end)
        start = end


def drawn_rows(segment: Segment, start: int, stop: int, seed: int) -> Iterator[Tensor]:
    """Return rows [start, stop) of a segment's random initial values, in fp32.

    They are drawn in blocks, with the columns of all ranks, so that no number depends on the mesh.
    """
    for rows in block_rows(start, stop):
        yield _rows(segment, rows, _fill(segment, rows, seed, torch.empty(_block_shape(segment, rows))))


def ahead(draws: Iterable[tuple[_T, Draw]], threads: int) -> Iterator[tuple[_T, int, Tensor]]:
    """Run draws on up to `threads` threads ahead of the caller, and yield their results in order.

    Yields the item before each draw, its first element and its values.
    """
    threads = min(threads, MOST_THREADS)
    if threads == 1:
        yield from (
            (each, draw.first, draw.values(draw.fill(torch.empty(draw.shape)))) for each, draw in draws
        )
        return
    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[tuple[_T, Draw, Future[Tensor]]] = deque()
        for each, draw in draws:
            # Allocated here: what a thread allocates and frees would stay in its own arena, of no use to the
            # run.
            waiting.append((each, draw, _submitted(pool, draw.fill, torch.empty(draw.shape))))
            if len(waiting) > threads:  # no more: a block of a large embedding takes megabytes
                yield _drawn(*waiting.popleft())
        while waiting:
            yield _drawn(*waiting.popleft())


def _submitted(pool: ThreadPoolExecutor, fill: Callable[[Tensor], Tensor], numbers: Tensor) -> Future[Tensor]:
    before = stack_size(STACK)  # not the usual 8 MB, which counts where a process may not allocate more
    try:
        return pool.submit(fill, numbers)
    finally:
        stack_size(before)


def _drawn(each: _T, draw: Draw, numbers: Future[Tensor]) -> tuple[_T, int, Tensor]:
    return each, draw.first, draw.values(numbers.result())
