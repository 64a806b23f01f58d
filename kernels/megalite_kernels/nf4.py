"""4-bit NormalFloat (NF4; Dettmers et al. 2023), and FP4, bit for bit as bitsandbytes computes them on a CPU.

A matrix is flattened row by row and cut into blocks of 64 elements, across the ends of rows; the last block
may be short. A block has the largest magnitude of its elements as its scale (absmax, fp32). The code of an
element is the number of the nearest of 16 values to x · (1 / absmax), in a short block to x / absmax; of two
equally near ones the smaller. NF4 and FP4 differ in the 16 values.

    value = table[code] · absmax        in fp32, rounded once to the dtype of the result

Two codes are a byte, the first in its high bits. With double quantization the scales are quantized, too, in
blocks of 256 (`quantize_scales`):

    absmax = dynamic table[code8] · absmax of 256 scales + offset        offset: the mean of the scales
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64  # elements that share a scale
NESTED = 256  # scales that share a scale of their own
_BINS = 32767.5  # half the number of bins in which bitsandbytes looks up the codes of scales
_AT_ONCE = 1 << 16  # scales that are quantized at a time, whole blocks of 256

_SMALLEST = 1e-38  # the least number that elements are divided by
_TWELFTHS = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)

TABLES = {
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    "fp4": tuple(sign * each / 12 for sign in (1, -1) for each in _TWELFTHS),
}
"""Format → its 16 values, of which one is zero. Those of nf4 ascend, from the quantiles of a normal
distribution. Those of fp4 are a sign, two bits of an exponent and one of a mantissa."""


@functools.lru_cache(maxsize=8)
def table(device: torch.device, form: str = "nf4") -> Tensor:
    """Return the 16 values of codes, [16] fp32."""
    return torch.tensor(TABLES[form], device=device)


@functools.lru_cache(maxsize=2)
def _midpoints(form: str) -> tuple[float, ...]:
    """Return the 15 numbers between neighbouring values, computed in fp32."""
    values = table(torch.device("cpu"), form).sort().values
    return tuple(((values[1:] + values[:-1]) / 2).tolist())


@functools.lru_cache(maxsize=8)
def _pairs(device: torch.device, form: str) -> Tensor:
    """Return the two values of each byte, [256] of 64 bits: one is looked up for two codes."""
    values, byte = table(device, form), torch.arange(256, device=device)
    return torch.stack((values[byte >> 4], values[byte & 15]), 1).view(torch.int64).view(-1)


@functools.lru_cache(maxsize=8)
def scale_table(device: torch.device) -> Tensor:
    """Return the 256 values of the codes of scales, ascending, [256] fp32.

    For n = 0 … 6 they are ± 10^(n − 6) · the midpoints of 2^n equal parts of [0.1, 1], and 0 and 1 besides
    (Dettmers et al. 2022, "dynamic tree").
    """
    values = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float32)
        means = 10 ** (exponent - 6) * ((edges[:-1] + edges[1:]) / 2)  # rounded to fp32
        values += [*means.tolist(), *(-means).tolist()]
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


class Blocks(NamedTuple):
    """Codes of consecutive elements, one a byte, [n] uint8, and scales of their blocks, [blocks] fp32."""

    codes: Tensor
    scales: Tensor


def quantize(values: Tensor, form: str = "nf4") -> Blocks:
    """Quantize consecutive elements of a flattened matrix, [n], from the start of a block on."""
    count = values.numel()
    blocks = _in_blocks(values.float(), BLOCK)
    scales = blocks.abs().amax(1)
    divisors = scales.clamp(min=_SMALLEST)
    scaled, codes = blocks * (1 / divisors).unsqueeze(1), torch.zeros_like(blocks, dtype=torch.uint8)
    if count % BLOCK:
        scaled[-1] = blocks[-1] / divisors[-1]
    for midpoint in _midpoints(form):  # on a CPU a third of the time of torch.bucketize
        codes += scaled > midpoint
    del scaled
    if form != "nf4":  # whose values do not ascend
        order = table(codes.device, form).argsort(stable=True).to(torch.uint8)
        codes = order.index_select(0, codes.view(-1).int())
    return Blocks(codes.view(-1)[:count], scales)


def _in_blocks(values: Tensor, size: int) -> Tensor:
    """Return [n] as [blocks, size], of which the last has zeros at its end; a copy only if n needs them."""
    rest = -values.numel() % size
    return (F.pad(values, (0, rest)) if rest else values).view(-1, size)


def pack(codes: Tensor) -> Tensor:
    """Return two codes a byte: [n] -> [ceil(n / 2)]."""
    pairs = _in_blocks(codes, 2)
    return pairs[:, 0] << 4 | pairs[:, 1]


def unpack(packed: Tensor, count: int) -> Tensor:
    """Return the first `count` codes of bytes."""
    return torch.stack((packed >> 4, packed & 15), 1).view(-1)[:count]


def values_of(packed: Tensor, count: int, form: str = "nf4") -> Tensor:
    """Return the values of the first `count` codes in units of their scales, [count] fp32."""
    return _pairs(packed.device, form).index_select(0, packed.int()).view(torch.float32)[:count]


def of_elements(scales: Tensor, count: int) -> Tensor:
    """Return the scale of each of `count` elements, from the start of a block on, [count]."""
    return scales.repeat_interleave(BLOCK)[:count]


class NestedScales(NamedTuple):
    """Quantized scales.

    Attributes:
        codes: [blocks] uint8.
        scales: of 256 of them, [ceil(blocks / 256)] fp32.
        offset: [] fp32.
    """

    codes: Tensor
    scales: Tensor
    offset: Tensor

    def values(self, first: int = 0, stop: int | None = None) -> Tensor:
        """Return the scales of blocks [first, stop) that the codes are, fp32."""
        codes = self.codes[first:stop]
        index = torch.arange(first, first + len(codes), device=codes.device) // NESTED
        return dequantize_scales(codes, self.scales[index], self.offset)


def quantize_scales(scales: Tensor) -> NestedScales:
    """Quantize all scales of a matrix, [blocks].

    bitsandbytes does not take the nearest of the 256 values on a CPU, but the one that is nearest to the
    middle of the bin, of 65,536, in which a scale is.
    """
    offset, codes = mean(scales), torch.empty(scales.shape, dtype=torch.uint8, device=scales.device)
    # some at a time: temporary tensors take ten times the memory of the scales
    largest = [
        _quantize_scales(own, offset, into)
        for own, into in zip(scales.split(_AT_ONCE), codes.split(_AT_ONCE), strict=True)
    ]
    return NestedScales(codes, torch.cat(largest), offset)


def _quantize_scales(scales: Tensor, offset: Tensor, codes: Tensor) -> Tensor:
    """Write the codes of scales from the start of a block of 256 on, and return the scales of blocks."""
    table, count = scale_table(scales.device), scales.numel()
    rest = _in_blocks(scales - offset, NESTED)
    largest = rest.abs().amax(1)
    inverse = torch.where(largest > 0, 1 / largest, 0.0)
    bins = torch.floor((rest * inverse.unsqueeze(1) + 1) * _BINS + 0.5).clamp_(0, 2 * _BINS)
    middles = bins.double() / _BINS - 1
    midpoints = (table[1:].double() + table[:-1].double()) / 2
    codes.copy_(torch.bucketize(middles, midpoints, out_int32=True).view(-1)[:count])
    return largest


def without_signs(values: Tensor, scales: Tensor) -> Tensor:
    """Return consecutive elements with other signs where the scales of their blocks are negative.

    Scales that were quantized may be below 0, if those of their neighbours are much larger. The codes of such
    a block are those of the elements with other signs.

    Args:
        values: [n], from the start of a block on.
        scales: of these blocks.
    """
    signs = torch.where(scales < 0, -1.0, 1.0)
    return values * of_elements(signs, values.numel()) if (scales < 0).any() else values


def mean(scales: Tensor) -> Tensor:
    """Return the mean of scales as torch computes it on one thread: its last bit depends on their number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return scales.mean()
    finally:
        torch.set_num_threads(threads)


def dequantize_scales(codes: Tensor, scales: Tensor, offset: Tensor) -> Tensor:
    """Return scales of blocks in fp32.

    Args:
        codes: of any shape.
        scales: for each code, of a shape that broadcasts.
    """
    return scale_table(codes.device)[codes.int()] * scales + offset
