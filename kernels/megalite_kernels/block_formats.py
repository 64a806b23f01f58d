"""Formats in which frozen matrices are kept: codes of few bits, and a scale for each block of elements.

A matrix is flattened row by row, and cut into blocks of consecutive elements.

    nf4     4 bits, 64 elements of any rows; fp32 scales, which may be quantized, too (`nf4`)
    fp4     as nf4, with other values
    int8    8 bits, a row; fp32 scales, the largest magnitude of the row in fp16, as bitsandbytes has them
            value = code · (scale · (1 / 127))
    mxfp4   4 bits (E2M1), 32 elements of a row; a power of two as an E8M0 byte, rounded up so that no element
            saturates (OCP Microscaling Formats 1.0; RCEIL, as torchao's to_mx)
            value = E2M1(code) · 2^(scale − 127)

Values are computed in fp32 and rounded once to the dtype of the result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite_kernels import nf4
from megalite_kernels.nf4 import Blocks


class BlockFormat(NamedTuple):
    """A format of codes and scales.

    Attributes:
        quantize: (consecutive elements [n] from the start of a block on, elements of a block, scales of these
            blocks if the elements are values of such codes) -> their codes, one a byte, and scales of blocks.
        pack: codes [n] -> bytes.
        values: (bytes, number of codes to skip, number of codes) -> values in units of scales, fp32.
        scale_dtype: of scales.
        scales: scales as they are kept -> in fp32.
    """

    quantize: Callable[[Tensor, int, Tensor | None], Blocks]
    pack: Callable[[Tensor], Tensor]
    values: Callable[[Tensor, int, int], Tensor]
    scale_dtype: torch.dtype
    scales: Callable[[Tensor], Tensor]


def _four_bits(form: str) -> BlockFormat:
    """Return a format of bitsandbytes in 4 bits."""
    return BlockFormat(
        lambda values, block, known: nf4.quantize(_of_codes(values, known), form),
        nf4.pack,
        lambda packed, skipped, count: nf4.values_of(packed, skipped + count, form)[skipped:],
        torch.float32,
        lambda scales: scales,
    )


def _of_codes(values: Tensor, known: Tensor | None) -> Tensor:
    return values if known is None else nf4.without_signs(values, known)


# ---- int8

_STEPS = 127


def _int8_quantize(values: Tensor, block: int, known: Tensor | None) -> Blocks:
    if known is None:
        rows = values.to(torch.float16).view(-1, block)
        scales = rows.abs().amax(1).float()
    else:  # in fp16 small values would lose bits
        rows, scales = values.view(-1, block), known
    factors = torch.where(scales > 0, _STEPS / scales, 0.0)
    codes = torch.round(rows * factors.unsqueeze(1)).to(torch.int8)
    return Blocks(codes.view(-1).view(torch.uint8), scales)


def _int8_values(packed: Tensor, skipped: int, count: int) -> Tensor:
    return packed[skipped : skipped + count].view(torch.int8).float()


# ---- mxfp4

_LARGEST, _BIAS = 6.0, 127
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@functools.lru_cache(maxsize=8)
def _e2m1(device: torch.device) -> Tensor:
    return torch.tensor((*_MAGNITUDES, *(-each for each in _MAGNITUDES)), device=device)


@functools.lru_cache(maxsize=8)
def _e2m1_pairs(device: torch.device) -> Tensor:
    """Return the two values of each byte, the first in its low bits, [256] of 64 bits."""
    values, byte = _e2m1(device), torch.arange(256, device=device)
    return torch.stack((values[byte & 15], values[byte >> 4]), 1).view(torch.int64).view(-1)


def _mxfp4_quantize(values: Tensor, block: int, known: Tensor | None) -> Blocks:
    blocks = values.float().view(-1, block)
    exponents = torch.ceil(torch.log2(blocks.abs().amax(1) / _LARGEST)).clamp_(-_BIAS, _BIAS)
    inverse = torch.ldexp(torch.ones_like(exponents), -exponents.int())
    scaled, codes = blocks * inverse.unsqueeze(1), torch.zeros_like(blocks, dtype=torch.uint8)
    sizes = scaled.abs()
    for lower, (one, other) in enumerate(zip(_MAGNITUDES, _MAGNITUDES[1:], strict=False)):
        middle = (one + other) / 2
        codes += sizes >= middle if lower % 2 else sizes > middle  # a tie goes to the even code
    codes |= torch.signbit(scaled).to(torch.uint8) << 3
    return Blocks(codes.view(-1), (exponents + _BIAS).to(torch.uint8))


def _mxfp4_pack(codes: Tensor) -> Tensor:
    pairs = F.pad(codes, (0, codes.numel() % 2)).view(-1, 2)
    return pairs[:, 1] << 4 | pairs[:, 0]


def _mxfp4_values(packed: Tensor, skipped: int, count: int) -> Tensor:
    pairs = _e2m1_pairs(packed.device).index_select(0, packed.int())
    return pairs.view(torch.float32)[skipped : skipped + count]


def _mxfp4_scales(scales: Tensor) -> Tensor:
    return torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - _BIAS)


FORMATS = {
    "nf4": _four_bits("nf4"),
    "fp4": _four_bits("fp4"),
    "int8": BlockFormat(
        _int8_quantize,
        lambda codes: codes,
        _int8_values,
        torch.float32,
        lambda scales: scales * (1.0 / _STEPS),
    ),
    "mxfp4": BlockFormat(_mxfp4_quantize, _mxfp4_pack, _mxfp4_values, torch.uint8, _mxfp4_scales),
}


def code_values(name: str, device: torch.device) -> Tensor:
    """Return the 16 values of codes of 4 bits, fp32; those of nf4 where codes have 8 bits."""
    return _e2m1(device) if name == "mxfp4" else nf4.table(device, "fp4" if name == "fp4" else "nf4")


def quantize(matrix: Tensor, name: str, block: int) -> Blocks:
    """Return the codes and scales of a whole matrix.

    Args:
        block: elements of a block.
    """
    return FORMATS[name].quantize(matrix.reshape(-1), block, None)


def rounded(
    matrix: Tensor,
    name: str,
    block: int,
    double: bool = False,
    scales: Tensor | None = None,
    known: bool = False,
) -> Tensor:
    """Return the values of a matrix, or of whole blocks of one, after quantization, in fp32.

    Args:
        block: elements of a block.
        double: whether the scales of nf4 or fp4 are quantized, too.
        scales: of blocks, that codes are multiplied by, if they are not found here.
        known: whether the elements are values of codes with these scales.
    """
    form, count = FORMATS[name], matrix.numel()
    codes, of_blocks = form.quantize(matrix.reshape(-1), block, scales if known else None)
    if scales is None:
        scales = nf4.quantize_scales(of_blocks).values() if double else of_blocks
    values = form.values(form.pack(codes), 0, count)
    return values.mul_(form.scales(scales).repeat_interleave(block)[:count]).view(matrix.shape)
