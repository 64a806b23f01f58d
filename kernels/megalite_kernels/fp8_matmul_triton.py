"""Matmuls of matrices with a scale for each block: `fp8_matmul.multiply` and `multiply_experts`.

A program computes a tile of the output. It multiplies the codes of one block of the contracted dimension,
applies the two scales and adds to fp32 registers: the tensor cores of Hopper add fp8 products with fewer bits
than fp32, so that only the 128 products of a block are summed there (DeepSeek-V3, 2024, 3.3.2). Of experts,
each program finds its expert from the ends of their rows, which are read on the device.

`mma.sync` and `wgmma` read 8-bit operands along the contracted dimension only, `tcgen05.mma` along either.
Transposed weights are therefore copied first, except on Blackwell.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite_kernels.fp8 import BLOCK
from megalite_kernels.launch import Variant, fp8_architecture, operation

TILES = {"sm_89": (64, 8, 3), "sm_90": (128, 8, 3), "sm_100": (128, 8, 3), "sm_120": (64, 8, 3)}
"""Architecture → rows of an output tile, warps, stages."""
READS_TRANSPOSED = {"sm_89": False, "sm_90": False, "sm_100": True, "sm_120": False}
"""Architecture → whether tiles are read from transposed weights; otherwise those are copied."""
TOGETHER = 8  # tiles of rows that follow each other, so that the weight is read from the second-level cache


@triton.jit
def _place(tile, ends, groups, rows, TILE_ROWS: tl.constexpr, GROUPED: tl.constexpr):
    """Return the group, the first row and the end of the rows of a tile of rows.

    The tiles of a group follow those of the group before; a tile after the last has no rows.
    """
    group, first, end = tile * 0, tile * TILE_ROWS, rows
    if GROUPED:
        first, end = tile * 0, tile * 0
        before, start = 0, 0
        for number in range(groups):
            stop = tl.load(ends + number)
            after = before + tl.cdiv(stop - start, TILE_ROWS)
            inside = (tile >= before) & (tile < after)
            group = tl.where(inside, number, group)
            first = tl.where(inside, start + (tile - before) * TILE_ROWS, first)
            end = tl.where(inside, stop, end)
            before, start = after, stop
    return group, first, end


@triton.jit(do_not_specialize=["rows", "groups", "tiles"])
def _matmul(
    a, a_scales, b, b_scales, out, ends, groups, tiles, rows, outputs, inner,
    TILE_ROWS: tl.constexpr, BLOCK: tl.constexpr, TOGETHER: tl.constexpr,
    GROUPED: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """b is [outputs, inner] for each group, in memory transposed or not, as its scales are."""
    across = outputs // BLOCK
    several = tl.program_id(0) // (TOGETHER * across) * TOGETHER
    height = tl.minimum(tiles - several, TOGETHER)
    within = tl.program_id(0) % (TOGETHER * across)
    tile, column = several + within % height, within // height
    group, first, end = _place(tile, ends, groups, rows, TILE_ROWS, GROUPED)
    row = first.to(tl.int64) + tl.arange(0, TILE_ROWS)
    exists = row < end
    output, k = column * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    left = a + row[:, None] * inner + k[None, :]
    right = b + group.to(tl.int64) * outputs * inner
    right_scales = b_scales + group * across * (inner // BLOCK)
    if TRANSPOSED:
        right += k[:, None] * outputs.to(tl.int64) + output[None, :]
        right_scales += column
    else:
        right += output[None, :] * inner.to(tl.int64) + k[:, None]
        right_scales += column * (inner // BLOCK)
    left_scales = a_scales + row * (inner // BLOCK)
    total = tl.zeros((TILE_ROWS, BLOCK), tl.float32)
    for number in range(inner // BLOCK):
        x = tl.load(left + number * BLOCK, mask=exists[:, None], other=0.0)
        w = tl.load(right)
        scale = tl.load(left_scales + number, mask=exists, other=0.0) * tl.load(right_scales)
        right += BLOCK * outputs.to(tl.int64) if TRANSPOSED else BLOCK
        right_scales += across if TRANSPOSED else 1
        total += tl.dot(x, w) * scale[:, None]
    at = row[:, None] * outputs + output[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=exists[:, None])


@functools.cache
def _variant(chip: str, grouped: bool, transposed: bool) -> Variant:
    rows, warps, stages = TILES[chip]
    constants = {"TILE_ROWS": rows, "BLOCK": BLOCK, "TOGETHER": TOGETHER}
    return Variant(_matmul, {**constants, "GROUPED": grouped, "TRANSPOSED": transposed}, warps, stages)


def _like(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, dtype: torch.dtype, ends: Tensor | None = None
) -> Tensor:
    return torch.empty(a.shape[0], b.shape[-2], dtype=dtype, device=a.device)


@operation(fake=_like)
def fp8_matmul(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, dtype: torch.dtype, ends: Tensor | None = None
) -> Tensor:
    """Return a bᵀ, [n, m], of codes a [n, k] and b [(groups,) m, k] and their scales by blocks of 128.

    Args:
        b: contiguous, or the transposed view of a contiguous tensor.
        ends: [groups] int32, the end of each group's rows; None: b is a single matrix.
    """
    out = _like(a, a_scales, b, b_scales, dtype, ends)
    if out.numel() == 0:
        return out
    chip = fp8_architecture(a.device)
    transposed = not b.is_contiguous() and READS_TRANSPOSED[chip]
    stored = [x.transpose(-1, -2).contiguous() if transposed else x.contiguous() for x in (b, b_scales)]
    variant = _variant(chip, ends is not None, transposed)
    tiles, groups = triton.cdiv(a.shape[0], variant.constants["TILE_ROWS"]), 0
    if ends is not None:  # each group may end inside a tile
        tiles, groups = tiles + len(ends), len(ends)
    variant.launch(
        (tiles * (out.shape[1] // BLOCK),),
        *(a.contiguous(), a_scales.contiguous(), *stored, out),
        *(a if ends is None else ends, groups, tiles, a.shape[0], *b.shape[-2:]),  # a: not read
    )
    return out
