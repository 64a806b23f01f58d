"""Many flat ranges of memory in one launch of a kernel: what the kernels of AdamW and of the gradient norm share.

A launch costs the host some ten microseconds, and a model's gradient is hundreds of ranges. So a kernel is given a table of them instead
of tensors. Ranges are cut into tiles of one size; a program handles one tile, and looks up which range that is of, where it starts there,
and the range's addresses. The two dependent loads hide behind the other programs of a multiprocessor.

A table is a function of addresses and lengths alone. A training step has the same ones each time, so tables are kept; the memory of one
is 4 bytes a tile. It is copied to the device without waiting.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

TYPE = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
"""Triton's type of the numbers that an address from a table leads to."""


class Tiles(NamedTuple):
    """The table of a launch."""

    owner: Tensor  # [tiles] int32: the range that each tile is of
    rows: Tensor  # [ranges, 2 + arrays] int64: a range's first tile, its length, and its address in each array


def aligned(x: Tensor) -> bool:
    """Whether a range can be moved 128 bits at a time."""
    return x.data_ptr() % 16 == 0 and x.numel() % 16 == 0


def cut(arrays: Sequence[Sequence[Tensor]], tile: int) -> Tiles:
    """The tiles of some ranges, one after the other.

    Args:
        arrays: for each array that a kernel works on, its part in every range; in a range all are of one length, in an array of one dtype.
        tile: elements of a tile.
    """
    device, lengths = arrays[0][0].device, tuple(x.numel() for x in arrays[0])
    for array in arrays:
        kinds = {(x.dtype, x.device, x.is_contiguous()) for x in array}
        if tuple(x.numel() for x in array) != lengths or kinds != {(array[0].dtype, device, True)}:
            raise ValueError("ranges must be contiguous, on one device, of one length in all arrays, and of one dtype within an array")
    return _table(device, tile, lengths, tuple(tuple(x.data_ptr() for x in array) for array in arrays))


@functools.lru_cache(maxsize=8)
def _table(device: torch.device, tile: int, lengths: tuple[int, ...], addresses: tuple[tuple[int, ...], ...]) -> Tiles:
    counts = torch.tensor([triton.cdiv(length, tile) for length in lengths])
    owner = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(counts)
    rows = torch.stack([counts.cumsum(0) - counts, *(torch.tensor(column) for column in (lengths, *addresses))], dim=1)
    return Tiles(owner.to(device, non_blocking=True), rows.to(device, non_blocking=True))


@triton.jit
def locate(owner, rows, ARRAYS: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr):
    """This program's tile: its range's row in the table, the positions of its elements in the range, and which of them exist."""
    tile = tl.program_id(0)
    row = rows + tl.load(owner + tile).to(tl.int64) * (2 + ARRAYS)
    length = tl.load(row + 1)
    if ALIGNED:
        length = tl.multiple_of(length, 16)
    at = (tile - tl.load(row)) * TILE + tl.arange(0, TILE)
    return row, at, at < length


@triton.jit
def address(row, ARRAY: tl.constexpr, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """Where a range begins in one of the arrays."""
    start = tl.load(row + 2 + ARRAY).to(tl.pointer_type(dtype))
    return tl.multiple_of(start, 16) if ALIGNED else start
