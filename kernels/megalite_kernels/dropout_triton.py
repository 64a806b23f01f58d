"""Dropout in one pass over memory: `dropout.dropout`, and its hashes for kernels. Bitwise the reference.

It reads and writes each element once: 4 bytes in bf16. The mask exists in registers alone; backward is the
same kernel, applied to the gradient. A program has a tile of rows (position, sample) × channels, and hashes
each row and each channel of it once. Row numbers are 64-bit.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite_kernels import dropout as reference
from megalite_kernels.launch import Variant, operation

_A, _B, _C = (tl.constexpr(factor) for factor in (reference._A, reference._B, reference._C))
TILE_BYTES = 4096  # with 4 warps two 128-bit loads per thread
COLUMNS = 256  # at most


@triton.jit
def _mix(h):
    """`dropout._mix_`: int32 arithmetic wraps, and right shifts are arithmetic."""
    h = h * _A
    h = h + (h >> 16)
    h = h * _B
    h = h + (h >> 16)
    h = h * _C
    return h + (h >> 16)


@triton.jit
def _row_hash(sample, key, position):
    low = (sample + (sample >> 32) * _B).to(tl.int32)
    return _mix(position * _C + _mix(low ^ key))


@triton.jit
def _keeps(row, column, THRESHOLD: tl.constexpr):
    h = (row ^ column) * _A
    return (h + (h >> 16)) * _B < THRESHOLD


@triton.jit(do_not_specialize=["p_s", "p_b", "rows", "batch", "key", "first_channel"])
def _dropout(
    x, y, samples, positions, p_s, p_b, rows, batch, width, key, first_channel,
    THRESHOLD: tl.constexpr, SCALE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(width, COLUMNS)
    program = tl.program_id(0)
    row = (program // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (program % across) * COLUMNS + tl.arange(0, COLUMNS)
    # One-dimensional until hashed: of a tensor [ROWS, 1] each thread would load a row's numbers once for each
    # of its channels.
    sample = tl.load(samples + row % batch)
    place = (row // batch) * p_s + (row % batch) * p_b
    position = tl.load(positions + place, mask=row < rows, other=0).to(tl.int32)
    row_hash, column_hash = _row_hash(sample, key, position), _mix((first_channel + column) * _C + _A)
    at, exists = row[:, None] * width + column[None, :], (row < rows)[:, None] & (column < width)[None, :]
    value = tl.load(x + at, mask=exists).to(tl.float32)
    keep = _keeps(row_hash[:, None], column_hash[None, :], THRESHOLD)
    # Multiplies by 0 as the reference, which keeps the sign and gives NaN for non-finite values.
    tl.store(y + at, (value * tl.where(keep, SCALE, 0.0)).to(y.dtype.element_ty), mask=exists)


@functools.cache
def _variant(dtype: torch.dtype, width: int, p: float) -> Variant:
    columns = min(triton.next_power_of_2(width), COLUMNS)
    constants = {
        "THRESHOLD": reference.threshold(p),
        "SCALE": reference.kept_scale(p, dtype),
        "ROWS": TILE_BYTES // dtype.itemsize // columns,
        "COLUMNS": columns,
    }
    return Variant(_dropout, constants, warps=4)


def _like_x(x: Tensor, key: int, samples: Tensor, positions: Tensor, p: float, channel_offset: int) -> Tensor:
    return x.new_empty(x.shape)


@operation(fake=_like_x)
def dropout(x: Tensor, key: int, samples: Tensor, positions: Tensor, p: float, channel_offset: int) -> Tensor:
    """Launch the kernel of `dropout.dropout`.

    x is [S, B, C], samples [B], positions [S], [S, 1] or [S, B]. The result is contiguous.
    """
    y, variant = _like_x(x, key, samples, positions, p, channel_offset), _variant(x.dtype, x.shape[-1], p)
    if y.numel():
        sequence, batch, width = x.shape
        positions = positions.reshape(sequence, -1).expand(sequence, batch)
        tile = variant.constants
        programs = triton.cdiv(sequence * batch, tile["ROWS"]) * triton.cdiv(width, tile["COLUMNS"])
        numbers = *positions.stride(), sequence * batch, batch, width, key, channel_offset
        tensors = x.contiguous(), y, samples.to(torch.int64).contiguous(), positions
        variant.launch((programs,), *tensors, *numbers)
    return y
