"""Quantization of the frozen matrices of a rank when they are read (`lora.base`).

Each matrix is quantized once, over the whole of it: a rank reads the rows whose codes or scales it keeps, all
columns of them, some rows at a time, so that it never holds a matrix in full precision. With double
quantization it reads all rows, because the scales of a matrix are quantized together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from megalite_kernels import nf4
from torch import Tensor

from megalite.parallel.quantized.buffers import QuantizedBuffers
from megalite.parallel.quantized.layout import MOST_THREADS, BaseForm, rows_at_once
from megalite.parallel.quantized.matmuls import QuantizedPart
from megalite.parallel.spec import Segment

if TYPE_CHECKING:
    from megalite.parallel.sharding.store import ParameterStore

BASE = "base"
"""Key of what identifies a base in the state of a checkpoint, which does not have it."""


class BaseSource(Protocol):
    """Where the matrices are read from, on the CPU."""

    def rows(self, matrix: Segment, first: int, stop: int) -> Tensor:
        """Return rows [first, stop) of a matrix, [rows, columns] in fp32, in new memory.

        Raises CheckpointError.
        """

    def nested(self, matrix: Segment, form: BaseForm) -> nf4.NestedScales | None:
        """Return the quantized scales of a matrix that is read in this form; None: they are computed."""

    def scales(self, matrix: Segment, form: BaseForm, first: int, stop: int) -> Tensor | None:
        """Return the scales of blocks [first, stop) of a matrix whose elements are values with these scales;
        None: they are computed."""


@torch.no_grad()
def quantize_base(store: ParameterStore, source: BaseSource, threads: int = 1) -> None:
    """Fill the quantized matrices that a rank keeps.

    The rows of a matrix are read in order, a range at a time.

    Args:
        threads: number of ranges that are quantized at the same time.
    """
    threads = min(threads, MOST_THREADS)
    with ThreadPoolExecutor(threads) as pool:
        for bucket in store.buckets:
            if isinstance(bucket.codes, QuantizedBuffers):
                for part in (part for parts in bucket.codes.parts for part in parts):
                    quantized = _Quantization(part, source, pool, threads)
                    (_quantize_double if part.double else _quantize)(bucket.codes, quantized)


class QuantizedRows(NamedTuple):
    """Rows [first, stop) of a matrix, quantized with all blocks that they touch.

    Attributes:
        start: the first element of `blocks` in the flattened matrix.
    """

    first: int
    stop: int
    blocks: nf4.Blocks
    start: int


class _Quantization:
    """Quantizes ranges of the rows of a matrix."""

    def __init__(self, part: QuantizedPart, source: BaseSource, pool: ThreadPoolExecutor, threads: int):
        self.part, self.source, self.pool, self.threads = part, source, pool, threads

    def rows(self, ranges: Iterable[tuple[int, int]]) -> Iterator[QuantizedRows]:
        """Yield ranges of rows in their order. They are read by this thread, and quantized by others."""
        waiting: deque[tuple[int, int, int, Future[nf4.Blocks]]] = deque()
        for first, stop in ranges:
            waiting.append(self._submitted(first, stop))
            if len(waiting) > self.threads:
                yield self._next(waiting)
        while waiting:
            yield self._next(waiting)

    def _submitted(self, first: int, stop: int) -> tuple[int, int, int, Future[nf4.Blocks]]:
        part, (values, start) = self.part, self._read(first, stop)
        number = start // part.block
        scales = self.source.scales(part.segment, part.form, number, number - -len(values) // part.block)
        # only the thread that quantizes the values keeps them
        return first, stop, start, self.pool.submit(part.format.quantize, values, part.block, scales)

    def _next(self, waiting: deque[tuple[int, int, int, Future[nf4.Blocks]]]) -> QuantizedRows:
        first, stop, start, quantized = waiting.popleft()
        return QuantizedRows(first, stop, quantized.result(), start)

    def _read(self, first: int, stop: int) -> tuple[Tensor, int]:
        """Read the whole blocks that rows [first, stop) touch.

        Returns:
            their elements, and the place of the first in the flattened matrix.
        """
        part, width = self.part, self.part.width
        start = first * width // part.block * part.block
        end = min(-(-stop * width // part.block) * part.block, part.segment.numel)
        low, high = start // width, -(-end // width)
        values = self.source.rows(part.segment, low, high).reshape(-1)
        return values[start - low * width : end - low * width], start


def _row_ranges(first: int, stop: int, width: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows, of which the first is at an even distance from `first`."""
    rows = rows_at_once(width)
    yield from ((row, min(row + rows, stop)) for row in range(first, stop, rows))


def _quantize(buffers: QuantizedBuffers, quantized: _Quantization) -> None:
    part = quantized.part
    last = part.first_row + part.rows
    ranges = (each for each in _row_ranges(part.first_row, last, part.width) if _keeps(buffers, part, *each))
    for each in quantized.rows(ranges):
        _write_codes(buffers, part, each)
        own = each.first - part.first_row, each.stop - part.first_row
        _write_scales(buffers, part, *own, each.blocks.scales, each.start // part.block)


def _keeps(buffers: QuantizedBuffers, part: QuantizedPart, first: int, stop: int) -> bool:
    """Return whether a rank keeps any code or scale of rows [first, stop) of a matrix."""
    low, high = first - part.first_row, stop - part.first_row
    codes, scales = part.place.codes.start, part.place.scales.start
    each, row = part.codes_in_byte, part.place.touched * part.scales.itemsize
    return buffers.keeps(codes + low * part.columns // each, codes - (-high * part.columns // each)) or (
        buffers.keeps(scales + low * row, scales + high * row)
    )


def _quantize_double(buffers: QuantizedBuffers, quantized: _Quantization) -> None:
    """Quantize all of a matrix, and then its scales."""
    part, done = quantized.part, 0
    scales = torch.empty(-(-part.segment.numel // part.block))
    end = part.first_row + part.rows
    edges = sorted({0, part.first_row, end, part.segment.shape[0]})
    ranges = (
        each
        for low, high in zip(edges, edges[1:], strict=False)
        for each in _row_ranges(low, high, part.width)
    )
    for each in quantized.rows(ranges):
        new = each.blocks.scales[done - each.start // part.block :]  # a cut block is there already
        scales[done : done + len(new)], done = new, done + len(new)
        if part.first_row <= each.first < end:
            _write_codes(buffers, part, each)
    nested = quantized.source.nested(part.segment, part.form) or nf4.quantize_scales(scales)
    for first, stop in _row_ranges(0, part.rows, part.width):
        _write_scales(buffers, part, first, stop, nested.codes, 0)
    of_rows = nested.scales[part.first_nested() :][: len(part.nested)]
    buffers.write(*part.in_memory(part.place.nested, of_rows))
    buffers.write(*part.in_memory(part.place.offset, nested.offset.view(1)))


def _write_codes(buffers: QuantizedBuffers, part: QuantizedPart, quantized: QuantizedRows) -> None:
    """Write this rank's columns of the codes of rows of its part."""
    first, stop, blocks, start = quantized
    low = first * part.width - start
    rows = blocks.codes[low : low + (stop - first) * part.width].view(stop - first, part.width)
    own = rows[:, part.first_column : part.first_column + part.columns].reshape(-1)
    byte = (first - part.first_row) * part.columns // part.codes_in_byte
    buffers.write(*part.in_memory(part.place.codes, part.format.pack(own), byte))


def _write_scales(
    buffers: QuantizedBuffers, part: QuantizedPart, first: int, stop: int, scales: Tensor, block: int
) -> None:
    """Write scales of rows [first, stop) of a part, or their codes; the first of `scales` is of `block`."""
    index = part.blocks(first, stop).cpu() - block
    own = scales[index.clamp_(max=len(scales) - 1)]  # beyond the last block that is touched: unused
    buffers.write(*part.in_memory(part.place.scales, own, first * part.place.touched))
