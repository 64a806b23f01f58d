"""Matrices of 8-bit floating-point numbers with a scale for each block, and their products.

    block    e4m3 codes; fp32 scales of 1 × 128 elements of activations and 128 × 128 of weights (DeepSeek-V3,
             2024, 3.3)
    mxfp8    e4m3 codes; power-of-two scales of 1 × 32 elements (OCP Microscaling Formats 1.0, 2023)

A code times its scale is the number. A scale depends on the largest element of its block only, so that a
matrix that is split between blocks has the codes and scales of the whole. Codes are rounded to nearest, ties
to even, and saturate at ±448. They are computed from fp32: bf16 converts exactly, fp64 is rounded to fp32
first. This is the reference of the kernels, bit for bit.

An infinite or NaN element makes its block NaN. No communication.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megalite_kernels.backend import takes_triton

BLOCK = 128
"""Elements of a block of `block`, in each dimension that has blocks."""
MX_BLOCK = 32
LARGEST = 448.0  # of e4m3
_SMALLEST_AMAX = 1e-12  # a smaller block is scaled as if this were its largest element

Recipe = Literal["block", "mxfp8"]


class Quantized(NamedTuple):
    """A matrix of codes with their scales.

    Attributes:
        codes: [.., rows, columns], float8_e4m3fn; contiguous as quantized, transposed as `t`.
        scales: [.., rows / block rows, columns / block columns]; fp32, or float8_e8m0fnu.
    """

    codes: Tensor
    scales: Tensor

    @property
    def recipe(self) -> Recipe:
        return "mxfp8" if self.scales.dtype == torch.float8_e8m0fnu else "block"

    @property
    def t(self) -> Quantized:
        """The transposed matrix, a view; of square blocks also its quantization."""
        return Quantized(self.codes.transpose(-1, -2), self.scales.transpose(-1, -2))


def quantize(x: Tensor, block: tuple[int, int], power_of_two: bool = False) -> Quantized:
    """Quantize a matrix with one fp32 scale for each block.

    Args:
        x: [.., rows, columns], in blocks of `block` (rows, columns) elements without remainder.
        power_of_two: round the factor 448 / amax down to a power of two, so that scaling is exact.
    """
    _check_sizes(x, block)
    if takes_triton(x) and x.numel():
        from megalite_kernels import fp8_triton

        # blocks do not reach from one matrix into the next
        codes, scales = fp8_triton.quantize(x.reshape(-1, x.shape[-1]), block[0], power_of_two)
        return Quantized(codes.view(x.shape), scales.view(*x.shape[:-2], -1, scales.shape[1]))
    blocks = _blocks(x, block)
    amax = blocks.abs().amax((-3, -1))
    factors = scale_factors(amax, power_of_two)  # [.., block rows, block columns]
    codes = round_to_codes(blocks * _spread(factors))
    return Quantized(codes.reshape(x.shape).contiguous(), factors.reciprocal())


def scale_factors(amax: Tensor, power_of_two: bool) -> Tensor:
    """Return what `quantize` multiplies the elements of blocks by, the reciprocals of their scales, in fp32.

    Args:
        amax: the largest magnitude of each block.
    """
    factors = (LARGEST / amax.double().clamp(min=_SMALLEST_AMAX)).float()
    return _floor_to_power_of_two(factors) if power_of_two else factors


def round_to_codes(scaled: Tensor) -> Tensor:
    """Round to e4m3. Numbers beyond ±448 become ±448; NaN stays NaN."""
    # Not every version of torch saturates; clamp keeps NaN.
    return scaled.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def quantize_mx(x: Tensor) -> Quantized:
    """Quantize a matrix with one power-of-two scale for 32 elements of a row.

    A scale is the smallest power of two that keeps the block within ±448 (the conversion RCEIL), at least
    2⁻¹²⁷, and NaN if the block has an infinite or NaN element.

    Args:
        x: [.., rows, columns], columns a multiple of 32.
    """
    _check_sizes(x, (1, MX_BLOCK))
    if takes_triton(x) and x.numel():
        from megalite_kernels import fp8_triton

        return Quantized(*fp8_triton.quantize_mx(x))
    blocks = _blocks(x, (1, MX_BLOCK))
    largest = blocks.abs().amax((-3, -1)) / LARGEST
    exponents = torch.where(largest.isfinite(), _ceil_to_exponent(largest), 255)
    # 2^(127 - exponent) in two factors, because it may be too small or too large for one
    half = torch.div(127 - exponents, 2, rounding_mode="floor")
    one = torch.ones_like(largest)
    scaled = blocks * _spread(one.ldexp(half)) * _spread(one.ldexp(127 - exponents - half))
    scaled = torch.where(_spread(exponents == 255), torch.nan, scaled)
    codes = round_to_codes(scaled).reshape(x.shape).contiguous()
    return Quantized(codes, exponents.to(torch.uint8).view(torch.float8_e8m0fnu))


def dequantize(matrix: Quantized, dtype: torch.dtype) -> Tensor:
    """Return codes times scales, multiplied in fp32 or, for fp64, in fp64."""
    wide = torch.promote_types(dtype, torch.float32)
    codes, scales = matrix
    if not codes.numel():
        return codes.to(dtype)
    block = codes.shape[-2] // scales.shape[-2], codes.shape[-1] // scales.shape[-1]
    return (_blocks(codes, block, wide) * _spread(scales.to(wide))).reshape(codes.shape).to(dtype)


def _check_sizes(x: Tensor, block: tuple[int, int]) -> None:
    rows, columns = x.shape[-2:]
    if rows % block[0] or columns % block[1]:
        raise ValueError(f"a matrix of {rows} x {columns} cannot be divided into {block[0]} x {block[1]}")


def _blocks(x: Tensor, block: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return [.., block rows, rows of a block, block columns, columns of a block], converted."""
    *leading, rows, columns = x.shape
    return x.to(dtype).reshape(*leading, rows // block[0], block[0], columns // block[1], block[1])


def _spread(each: Tensor) -> Tensor:
    """Return one number for each block in a shape that applies to all elements of `_blocks`."""
    return each.unsqueeze(-1).unsqueeze(-3)


def _floor_to_power_of_two(x: Tensor) -> Tensor:
    """Round normal numbers ≥ 0 down to a power of two, by their bits: log2 may round up."""
    return torch.where(x.isnan(), x, (x.view(torch.int32) & 0x7F800000).view(torch.float32))


def _ceil_to_exponent(x: Tensor) -> Tensor:
    """Return e + 127 of the smallest 2ᵉ ≥ x with e ≥ -127, for finite x ≥ 0; int32."""
    bits = x.view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    normal = exponent + (mantissa > 0)
    return torch.where(exponent > 0, normal, (mantissa > 0x400000).to(torch.int32))
