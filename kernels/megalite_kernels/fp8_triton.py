"""Quantization to fp8 in one pass over memory: `fp8.quantize` and `fp8.quantize_mx`.

A program reads a tile, takes the largest magnitude of each block in it, and writes codes and scales. Codes
are computed from the bits of fp32 numbers with integer operations, so that they are the reference's on every
architecture, also those without conversions to e4m3, and in Triton's interpreter.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite_kernels.fp8 import BLOCK, MX_BLOCK
from megalite_kernels.launch import Variant, operation

ROWS = 16  # of a program's tile with blocks of one row


@triton.jit
def _codes(x):
    """Round fp32 within ±448, or NaN, to e4m3; returns the bits."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # 20 bits of the mantissa are rounded off, ties to even; the bias of the exponent is 127 - 7 less
    rounded = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    normal = rounded - (120 << 3)
    # below 2⁻⁶ the sum with 2¹⁴ rounds to multiples of 2⁻⁹
    shifted = magnitude.to(tl.float32, bitcast=True) + 16384.0
    subnormal = shifted.to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, subnormal, normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _largest(value, AXIS: tl.constexpr):
    """Return the largest magnitude along an axis; NaN if there is a NaN, which has the largest bits."""
    magnitude = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(magnitude, AXIS).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["rows"])
def _quantize(
    x, codes, scales, rows, columns,
    POWER_OF_TWO: tl.constexpr, TILE_ROWS: tl.constexpr, ROWS_OF_BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Quantize tiles of TILE_ROWS × COLUMNS; a block has one row of a tile, or all of them."""
    number = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at, exists = number[:, None] * columns + column[None, :], (number < rows)[:, None]
    value = tl.load(x + at, mask=exists, other=0.0).to(tl.float32)
    amax = _largest(value, 1)
    if ROWS_OF_BLOCK > 1:
        amax = tl.zeros((TILE_ROWS,), tl.float32) + _largest(amax, 0)
    wide = tl.where(amax < 1e-12, 1e-12, amax.to(tl.float64))
    factor = (448.0 / wide).to(tl.float32)
    if POWER_OF_TWO:
        floor = (factor.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        factor = tl.where(factor != factor, factor, floor)
    tl.store(codes + at, _codes(_clamp(value * factor[:, None])), mask=exists)
    inverse = tl.div_rn(tl.full((TILE_ROWS,), 1.0, tl.float32), factor)
    if ROWS_OF_BLOCK > 1:
        tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        tl.store(scales + tile + tl.arange(0, TILE_ROWS), inverse, mask=tl.arange(0, TILE_ROWS) == 0)
    else:
        tl.store(scales + number * tl.num_programs(1) + tl.program_id(1), inverse, mask=number < rows)


@triton.jit
def _clamp(x):
    """Limit to ±448; NaN stays NaN."""
    return tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))


@triton.jit(do_not_specialize=["blocks"])
def _quantize_mx(x, codes, scales, blocks, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Quantize TILE blocks of BLOCK consecutive elements."""
    number = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    at, exists = number[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :], (number < blocks)[:, None]
    value = tl.load(x + at, mask=exists, other=0.0).to(tl.float32)
    quotient = tl.div_rn(_largest(value, 1), tl.full((TILE,), 448.0, tl.float32))
    bits = quotient.to(tl.int32, bitcast=True)
    # the exponent of the smallest power of two that is not below the quotient, at least 2⁻¹²⁷
    mantissa = bits & 0x7FFFFF
    exponent = (bits >> 23) + (mantissa > 0).to(tl.int32)
    exponent = tl.where(bits < 0x800000, (mantissa > 0x400000).to(tl.int32), exponent)
    finite = bits < 0x7F800000
    exponent = tl.where(finite, exponent, 255)
    # 2^(127 - exponent) in two factors, because it may be too small or too large for one
    power = 127 - exponent
    half = power >> 1
    first = ((half + 127) << 23).to(tl.float32, bitcast=True)
    second = ((power - half + 127) << 23).to(tl.float32, bitcast=True)
    code = _codes(_clamp(value * first[:, None] * second[:, None]))
    tl.store(codes + at, tl.where(finite[:, None], code, 0x7F), mask=exists)
    tl.store(scales + number, exponent.to(tl.uint8), mask=number < blocks)


@functools.cache
def _variant(rows_of_block: int, power_of_two: bool, columns_of_block: int = BLOCK) -> Variant:
    if columns_of_block == MX_BLOCK:
        return Variant(_quantize_mx, {"TILE": 64, "BLOCK": MX_BLOCK}, 4)
    tile, warps = (ROWS, 4) if rows_of_block == 1 else (BLOCK, 8)
    constants = {
        "POWER_OF_TWO": power_of_two,
        "TILE_ROWS": tile,
        "ROWS_OF_BLOCK": rows_of_block,
        "COLUMNS": BLOCK,
    }
    return Variant(_quantize, constants, warps)


def _like(x: Tensor, rows_of_block: int, power_of_two: bool) -> tuple[Tensor, Tensor]:
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    return codes, x.new_empty(x.shape[0] // rows_of_block, x.shape[1] // BLOCK, dtype=torch.float32)


@operation(fake=_like)
def quantize(x: Tensor, rows_of_block: int, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Return codes and scales of `fp8.quantize` of [rows, columns]."""
    codes, scales = _like(x, rows_of_block, power_of_two)
    variant, (rows, columns) = _variant(rows_of_block, power_of_two), x.shape
    grid = triton.cdiv(rows, variant.constants["TILE_ROWS"]), columns // BLOCK
    variant.launch(grid, x.contiguous(), codes.view(torch.uint8), scales, rows, columns)
    return codes, scales


def _like_mx(x: Tensor) -> tuple[Tensor, Tensor]:
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = x.new_empty(*x.shape[:-1], x.shape[-1] // MX_BLOCK, dtype=torch.uint8)
    return codes, scales.view(torch.float8_e8m0fnu)


@operation(fake=_like_mx)
def quantize_mx(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and scales of `fp8.quantize_mx`."""
    codes, scales = _like_mx(x)
    variant, blocks = _variant(1, False, MX_BLOCK), x.numel() // MX_BLOCK
    grid = (triton.cdiv(blocks, variant.constants["TILE"]),)
    variant.launch(grid, x.contiguous(), codes.view(torch.uint8), scales.view(torch.uint8), blocks)
    return codes, scales
