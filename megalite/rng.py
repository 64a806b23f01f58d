"""Random numbers keyed by their purpose, not by the rank that draws them: the same numbers under every mesh.

Initial weights are drawn on the CPU in blocks of rows, each from a generator keyed by (seed, segment name, block). A rank draws the blocks
that it keeps a part of, several at a time, and keeps its part. (Dropout's keyed mask is in the kernels.)
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from math import prod
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megalite.mesh.layout import Coordinates
    from megalite.parallel.spec import LocalPart, Segment

BLOCK_ROWS = 128  # never change it: another value would draw other weights from the same seed

_T = TypeVar("_T")


def key(*parts: int | str) -> int:
    """A 63-bit number that depends on every part and on their order."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def normal(shape: tuple[int, ...], *parts: int | str) -> Tensor:
    """Samples of normal(0, 1) with the key of `parts`, fp32, on the CPU."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(key(*parts)))


class Draw(NamedTuple):
    """What initialises a range of a segment on a rank.

    Attributes:
        first: the first element, counted in the rank's local shape, flat.
        numbers: draws; may be called on any thread, whose core it uses alone.
        values: of these numbers the range's values, flat, fp32. Called where all cores may be used.
    """

    first: int
    numbers: Callable[[], Tensor]
    values: Callable[[Tensor], Tensor]


def initial_values(segment: Segment, at: Coordinates, seed: int, low: int, high: int) -> Iterator[Draw]:
    """What initialises elements [low, high) of a segment on the rank at these coordinates, counted in its local shape, flat; in order.

    The ranges are whole rows of a block, so the first and the last may reach beyond [low, high). Padding is zero.
    """
    part = segment.local(at)
    width = prod(part.shape[1:])
    if low >= high:
        return
    if segment.init_std == 0.0:
        yield Draw(low, partial(torch.empty, 0), lambda _: torch.full((high - low,), segment.init_value))
        return
    start, end = part.offsets[0], part.offsets[0] + part.sizes[0]
    first, last = start + low // width, start + -(-high // width)  # rows of the global tensor, or of its padding
    for rows in block_rows(first, min(last, end)):
        numbers, values = partial(_numbers, segment, rows, seed), partial(_local_rows, segment, part, rows)
        yield Draw((rows.start - start) * width, numbers, values)
    if last > max(first, end):
        padding = (last - max(first, end)) * width
        yield Draw((max(first, end) - start) * width, partial(torch.empty, 0), lambda _: torch.zeros(padding))


def _numbers(segment: Segment, rows: range, seed: int) -> Tensor:
    """The numbers of the block that has these rows."""
    number = rows.start // BLOCK_ROWS
    count = min(BLOCK_ROWS, segment.shape[0] - number * BLOCK_ROWS)
    return normal((count, *segment.shape[1:]), seed, segment.name, number)


def _rows(segment: Segment, rows: range, numbers: Tensor) -> Tensor:
    first = rows.start % BLOCK_ROWS
    return numbers[first : first + len(rows)].mul_(segment.init_std)


def _local_rows(segment: Segment, part: LocalPart, rows: range, numbers: Tensor) -> Tensor:
    drawn = _rows(segment, rows, numbers)
    if part.sizes[1:] == part.shape[1:] == segment.shape[1:]:
        return drawn.flatten()
    columns = tuple(slice(offset, offset + size) for offset, size in zip(part.offsets[1:], part.sizes[1:], strict=True))
    values = torch.zeros(len(rows), *part.shape[1:])
    values[(slice(None), *(slice(0, size) for size in part.sizes[1:]))] = drawn[(slice(None), *columns)]
    return values.flatten()


def block_rows(start: int, stop: int) -> Iterator[range]:
    """Rows [start, stop), divided where blocks begin."""
    while start < stop:
        end = min(start - start % BLOCK_ROWS + BLOCK_ROWS, stop)
        yield range(start, end)
        start = end


def drawn_rows(segment: Segment, start: int, stop: int, seed: int) -> Iterator[Tensor]:
    """Rows [start, stop) of a segment's random initial values, fp32, whole: in blocks, with the columns of all ranks, so that no number
    depends on the mesh."""
    for rows in block_rows(start, stop):
        yield _rows(segment, rows, _numbers(segment, rows, seed))


def ahead(draws: Iterable[tuple[_T, Draw]], threads: int) -> Iterator[tuple[_T, int, Tensor]]:
    """What stands before each draw, its first element and its values, in order. Draws on `threads` threads, ahead of the caller."""
    if threads == 1:
        yield from ((each, draw.first, draw.values(draw.numbers())) for each, draw in draws)
        return
    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[tuple[_T, Draw, Future[Tensor]]] = deque()
        for each, draw in draws:
            waiting.append((each, draw, pool.submit(draw.numbers)))
            if len(waiting) > threads:  # no more: a block of a large embedding takes megabytes
                yield _drawn(*waiting.popleft())
        while waiting:
            yield _drawn(*waiting.popleft())


def _drawn(each: _T, draw: Draw, numbers: Future[Tensor]) -> tuple[_T, int, Tensor]:
    return each, draw.first, draw.values(numbers.result())
