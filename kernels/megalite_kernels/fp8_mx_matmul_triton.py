"""Matmuls of matrices in mxfp8: `fp8_matmul.multiply` and `multiply_experts`.

The tensor cores of Blackwell read e4m3 codes with the power-of-two scale of each 32, and add their products
in fp32: no thread touches a scale or a partial sum. A program computes a tile of the output; of experts, it
finds its own as in `fp8_matmul_triton`. Both operands lie along the contracted dimension, because a weight is
quantized along each of its dimensions. Sizes are multiples of 32, so that the last tiles are masked.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite_kernels.fp8 import MX_BLOCK
from megalite_kernels.fp8_matmul_triton import TOGETHER, _like, _place
from megalite_kernels.launch import Variant, fp8_architecture, operation

TILES = {"sm_100": (128, 256, 128, 8, 3), "sm_120": (128, 128, 128, 8, 3)}
"""Architecture → rows and columns of an output tile, elements of the contracted dimension at a time, warps,
stages."""
CODES = tl.constexpr("e4m3")


@triton.jit(do_not_specialize=["rows", "groups", "tiles"])
def _mx_matmul(
    a, a_scales, b, b_scales, out, ends, groups, tiles, rows, outputs, inner,
    TILE_ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, BLOCK: tl.constexpr,
    TOGETHER: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """b is [outputs, inner] for each group; scales are exponents, biased by 127."""
    across = tl.cdiv(outputs, COLUMNS)
    several = tl.program_id(0) // (TOGETHER * across) * TOGETHER
    height = tl.minimum(tiles - several, TOGETHER)
    within = tl.program_id(0) % (TOGETHER * across)
    tile, column = several + within % height, within // height
    group, first, end = _place(tile, ends, groups, rows, TILE_ROWS, GROUPED)
    row = first.to(tl.int64) + tl.arange(0, TILE_ROWS)
    output = column * COLUMNS + tl.arange(0, COLUMNS)
    weight_row = group.to(tl.int64) * outputs + output
    k, block = tl.arange(0, INNER), tl.arange(0, INNER // BLOCK)
    left = a + row[:, None] * inner + k[None, :]
    right = b + weight_row[None, :] * inner + k[:, None]
    left_scales = a_scales + row[:, None] * (inner // BLOCK) + block[None, :]
    right_scales = b_scales + weight_row[:, None] * (inner // BLOCK) + block[None, :]
    exists, computed = row < end, output < outputs
    total = tl.zeros((TILE_ROWS, COLUMNS), tl.float32)
    for start in range(0, inner, INNER):
        inside, scaled = k < inner - start, block < (inner - start) // BLOCK
        x = tl.load(left + start, mask=exists[:, None] & inside[None, :], other=0.0)
        w = tl.load(right + start, mask=computed[None, :] & inside[:, None], other=0.0)
        at = start // BLOCK
        x_scales = tl.load(left_scales + at, mask=exists[:, None] & scaled[None, :], other=0)
        w_scales = tl.load(right_scales + at, mask=computed[:, None] & scaled[None, :], other=0)
        total = tl.dot_scaled(x, x_scales, CODES, w, w_scales, CODES, total)
    at = out + row[:, None] * outputs + output[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=exists[:, None] & computed[None, :])


@functools.cache
def _variant(chip: str, grouped: bool) -> Variant:
    rows, columns, inner, warps, stages = TILES[chip]
    constants = {"TILE_ROWS": rows, "COLUMNS": columns, "INNER": inner}
    constants |= {"BLOCK": MX_BLOCK, "TOGETHER": TOGETHER, "GROUPED": grouped}
    return Variant(_mx_matmul, constants, warps, stages)


@operation(fake=_like)
def fp8_mx_matmul(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, dtype: torch.dtype, ends: Tensor | None = None
) -> Tensor:
    """Return a bᵀ, [n, m], of codes a [n, k] and b [(groups,) m, k] and their scales by 32 elements of a row.

    Args:
        ends: [groups] int32, the end of each group's rows; None: b is a single matrix.
    """
    out = _like(a, a_scales, b, b_scales, dtype, ends)
    if out.numel() == 0:
        return out
    variant = _variant(fp8_architecture(a.device), ends is not None)
    tiles, groups = triton.cdiv(a.shape[0], variant.constants["TILE_ROWS"]), 0
    if ends is not None:  # each group may end inside a tile
        tiles, groups = tiles + len(ends), len(ends)
    scales, weight_scales = (x.contiguous().view(torch.uint8) for x in (a_scales, b_scales))
    variant.launch(
        (tiles * triton.cdiv(out.shape[1], variant.constants["COLUMNS"]),),
        *(a.contiguous(), scales, b.contiguous(), weight_scales, out),
        *(a if ends is None else ends, groups, tiles, a.shape[0], *b.shape[-2:]),  # a: not read
    )
    return out
