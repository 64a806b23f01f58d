"""Many flat ranges of memory in one kernel launch: shared by the kernels of AdamW and of the gradient norm.

A launch costs the host some ten microseconds, and a model's gradient consists of hundreds of ranges. So a
kernel's argument is a table of ranges instead of tensors. Ranges are cut into tiles of one size; a program
handles one tile, and looks up its range, its offset in the range and the range's addresses. The latency of
the two dependent loads is hidden by the other programs of a multiprocessor.

A table depends only on addresses and lengths. These are the same in each training step, so tables are cached;
one takes 4 bytes per tile. It is copied to the device without a wait.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite_kernels.launch import upload

TYPE = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
"""Triton's type of the elements at an address from a table."""


class Tiles(NamedTuple):
    """Table of one launch."""

    owner: Tensor  # [tiles] int32: the range that each tile belongs to
    # [ranges, 2 + arrays] int64: a range's first tile, its length, and its address in each array
    rows: Tensor


def aligned(x: Tensor) -> bool:
    """Return whether a range can be loaded and stored 128 bits at a time."""
    return x.data_ptr() % 16 == 0 and x.numel() % 16 == 0


def cut(arrays: Sequence[Sequence[Tensor]], tile: int) -> Tiles:
    """Return the tiles of ranges, one range after the other.

    Args:
        arrays: for each array of a kernel, its part of every range. The parts of a range have the same
            length, the parts of an array the same dtype.
        tile: elements per tile.

    Raises:
        ValueError: lengths, dtypes or devices differ, or a range is not contiguous.
    """
    device, lengths = arrays[0][0].device, tuple(x.numel() for x in arrays[0])
    for array in arrays:
        kinds = {(x.dtype, x.device, x.is_contiguous()) for x in array}
        if tuple(x.numel() for x in array) != lengths or kinds != {(array[0].dtype, device, True)}:
            raise ValueError(
                "ranges must be contiguous, on one device, of one length in all arrays, and of one dtype "
                "within an array"
            )
    return _table(device, tile, lengths, tuple(tuple(x.data_ptr() for x in array) for array in arrays))


@functools.lru_cache(maxsize=8)
def _table(
    device: torch.device, tile: int, lengths: tuple[int, ...], addresses: tuple[tuple[int, ...], ...]
) -> Tiles:
    counts = torch.tensor([triton.cdiv(length, tile) for length in lengths])
    owner = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(counts)
    columns = [counts.cumsum(0) - counts, *(torch.tensor(column) for column in (lengths, *addresses))]
    rows = torch.stack(columns, dim=1)
    return Tiles(upload(owner, device), upload(rows, device))


@triton.jit
def locate(owner, rows, ARRAYS: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr):
    """Return the table row of this program's range, the positions of its elements, and which exist."""
    tile = tl.program_id(0)
    row = rows + tl.load(owner + tile).to(tl.int64) * (2 + ARRAYS)
    length = tl.load(row + 1)
    if ALIGNED:
        length = tl.multiple_of(length, 16)
    at = (tile - tl.load(row)) * TILE + tl.arange(0, TILE)
    return row, at, at < length


@triton.jit
def address(row, ARRAY: tl.constexpr, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """Return a pointer to the begin of a range in one of the arrays."""
    start = tl.load(row + 2 + ARRAY).to(tl.pointer_type(dtype))
    return tl.multiple_of(start, 16) if ALIGNED else start
