"""Quantization of the frozen matrices of a rank when they are read (`lora.base`).

Each matrix is quantized once, over the whole of it: a rank reads the rows whose codes or scales it keeps, all
columns of them, some rows at a time, so that it never holds a matrix in full precision. With double
quantization it reads all rows, because the scales of a matrix are quantized together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import torch
from megalite_kernels import nf4
from torch import Tensor

from megalite.parallel.quantized.buffers import QuantizedBuffers
from megalite.parallel.quantized.matmuls import AT_ONCE, QuantizedPart
from megalite.parallel.spec import Segment

if TYPE_CHECKING:
    from megalite.parallel.sharding.store import ParameterStore

BASE = "base"
"""Key of what identifies a base in the state of a checkpoint, which does not have it."""


class BaseSource(Protocol):
    """Where the matrices are read from, on the CPU."""

    def rows(self, matrix: Segment, first: int, stop: int) -> Tensor:
        """Return rows [first, stop) of a matrix, [rows, columns] in fp32. Raises CheckpointError."""

    def nested(self, matrix: Segment) -> nf4.NestedScales | None:
        """Return the quantized scales of a matrix that is read in this form; None: they are computed."""


@torch.no_grad()
def quantize_base(store: ParameterStore, source: BaseSource) -> None:
    """Fill the quantized matrices that a rank keeps.

    The rows of a matrix are read in order, a range at a time.
    """
    for bucket in store.buckets:
        if isinstance(bucket.codes, QuantizedBuffers):
            for part in (part for parts in bucket.codes.parts for part in parts):
                (_quantize_double if part.double else _quantize)(bucket.codes, part, source)


def _row_ranges(first: int, stop: int, width: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows, of which the first is at an even distance from `first`."""
    rows = max(AT_ONCE // width // 2 * 2, 2)
    yield from ((row, min(row + rows, stop)) for row in range(first, stop, rows))


def _quantize(buffers: QuantizedBuffers, part: QuantizedPart, source: BaseSource) -> None:
    for first, stop in _row_ranges(0, part.rows, part.width):
        low, high = first * part.columns // part.codes_in_byte, -(-stop * part.columns // part.codes_in_byte)
        wanted = part.place.codes.start + low, part.place.codes.start + high
        row = part.place.touched * part.scales.itemsize
        scales = part.place.scales.start + first * row, part.place.scales.start + stop * row
        if not (buffers.keeps(*wanted) or buffers.keeps(*scales)):
            continue
        blocks, start = _blocks(part, part.first_row + first, part.first_row + stop, source)
        _write_codes(buffers, part, first, stop, blocks, start)
        _write_scales(buffers, part, first, stop, blocks.scales, start // part.block)


def _quantize_double(buffers: QuantizedBuffers, part: QuantizedPart, source: BaseSource) -> None:
    """Quantize all of a matrix, and then its scales."""
    length, end = part.segment.shape[0], part.first_row + part.rows
    scales = list[Tensor]()
    edges = sorted({0, part.first_row, end, length})
    for low, high in zip(edges, edges[1:], strict=False):
        for first, stop in _row_ranges(low, high, part.width):
            blocks, start = _blocks(part, first, stop, source)
            done = sum(map(len, scales))
            scales.append(blocks.scales[done - start // part.block :])  # a cut block is quantized twice
            if part.first_row <= first < end:
                _write_codes(buffers, part, first - part.first_row, stop - part.first_row, blocks, start)
    nested = source.nested(part.segment) or nf4.quantize_scales(torch.cat(scales))
    for first, stop in _row_ranges(0, part.rows, part.width):
        _write_scales(buffers, part, first, stop, nested.codes, 0)
    of_rows = nested.scales[part.first_nested() :][: len(part.nested)]
    buffers.write(*part.in_memory(part.place.nested, of_rows))
    buffers.write(*part.in_memory(part.place.offset, nested.offset.view(1)))


def _blocks(part: QuantizedPart, first: int, stop: int, source: BaseSource) -> tuple[nf4.Blocks, int]:
    """Quantize the blocks that rows [first, stop) of the matrix touch.

    Returns:
        the codes and scales of whole blocks, and the first element of these in the flattened matrix.
    """
    width, numel = part.width, part.segment.numel
    start = first * width // part.block * part.block
    end = min(-(-stop * width // part.block) * part.block, numel)
    low, high = start // width, -(-end // width)
    values = source.rows(part.segment, low, high).reshape(-1)
    return part.format.quantize(values[start - low * width : end - low * width], part.block), start


def _write_codes(
    buffers: QuantizedBuffers, part: QuantizedPart, first: int, stop: int, blocks: nf4.Blocks, start: int
) -> None:
    """Write the codes of rows [first, stop) of a part, of blocks that begin at element `start`."""
    low = (part.first_row + first) * part.width - start
    rows = blocks.codes[low : low + (stop - first) * part.width].view(stop - first, part.width)
    own = rows[:, part.first_column : part.first_column + part.columns].reshape(-1)
    byte = first * part.columns // part.codes_in_byte
    buffers.write(*part.in_memory(part.place.codes, part.format.pack(own), byte))


def _write_scales(
    buffers: QuantizedBuffers, part: QuantizedPart, first: int, stop: int, scales: Tensor, block: int
) -> None:
    """Write scales of rows [first, stop) of a part, or their codes; the first of `scales` is of `block`."""
    index = part.blocks(first, stop).cpu() - block
    own = scales[index.clamp_(max=len(scales) - 1)]  # beyond the last block that is touched: unused
    buffers.write(*part.in_memory(part.place.scales, own, first * part.place.touched))
