"""Moments of optimizers in fewer than 32 bits: bf16 with stochastic rounding, and 8-bit block-wise codes.

    bf16    rounded up or down at random, with the probabilities that make the expected value exact: rounding
            to the nearest would lose a change below half of the spacing, 1/256 of the value, in every step
    8bit    blocks of consecutive elements share a scale, their largest magnitude; a code is one of 256
            numbers in [-1, 1], or in [0, 1] for moments that are never negative (dynamic codes, Dettmers et
            al. 2022, "8-bit Optimizers via Block-wise Quantization": the codes of bitsandbytes)

The random bits are a hash of (seed, step, kind of moment, tensor) and of the element's index in the global
tensor, so that they are the same wherever the element is:

    h = (index ^ tensor) · C ^ key
    h = h ^ (h >> 16);  h = h · A;  h = h ^ (h >> 15);  h = h · B;  h = h ^ (h >> 16)

All arithmetic is int32, wrapping, with logical right shifts.

A number of 8 bits is 0.1 + 0.9 · (k + ½) / n of a power of ten, k < n: n is 1, 2, 4, … 64 for 1e-6, … 1 with
a sign, and twice that without; and 0 and 1.
"""

import functools

import torch
from torch import Tensor

from megalite_kernels.dropout import dropout_key

DECADES = 7
_A, _B, _C = 0x7FEB352D, 0x846CA68B - (1 << 32), 0x1B56C4E9  # odd: multiplication by them permutes the int32s


def rounding_key(seed: int, step: int, kind: int) -> int:
    """Return the int32 key of the random bits of one kind of moment in a step."""
    return dropout_key(seed, step, 0x6D6F6D, kind)


def random_bits(key: int, tensor: int, indices: Tensor) -> Tensor:
    """Return 32 random bits for each element, int32 of the shape of `indices`.

    Args:
        key: of `rounding_key`.
        tensor: an int32 that identifies the global tensor.
        indices: of the elements in it, flat, int64.
    """
    folded = (indices ^ (indices >> 32) * _C).to(torch.int32)  # uses both halves of indices beyond 2^32
    h = folded.bitwise_xor_(tensor).mul_(_C).bitwise_xor_(key)
    h.bitwise_xor_((h >> 16).bitwise_and_(0xFFFF)).mul_(_A)
    h.bitwise_xor_((h >> 15).bitwise_and_(0x1FFFF)).mul_(_B)
    h.bitwise_xor_((h >> 16).bitwise_and_(0xFFFF))
    return h


def stochastic_bf16(values: Tensor, bits: Tensor) -> Tensor:
    """Return finite values rounded to bf16, up if the lower 16 of their random bits exceed what is cut off.

    Args:
        bits: int32, of the shape of `values`.
    """
    x = values.to(torch.float32).view(torch.int32)
    return ((x + (bits & 0xFFFF)) & -0x10000).view(torch.float32).to(torch.bfloat16)


@functools.cache
def _table(signed: bool) -> Tensor:
    """Return the 256 numbers of a code in ascending order, fp32."""
    numbers = [torch.tensor([0.0, 1.0])]
    for decade in range(DECADES):
        steps = 2**decade if signed else 2 ** (decade + 1)
        borders = torch.linspace(0.1, 1, steps + 1, dtype=torch.float32)
        middles = 10.0 ** (decade - (DECADES - 1)) * ((borders[:-1] + borders[1:]) / 2)
        numbers += [middles, -middles] if signed else [middles]
    return torch.cat(numbers).sort().values


@functools.cache
def code_table(signed: bool, device: torch.device) -> Tensor:
    """Return the 256 numbers of a code in ascending order, fp32 on a device."""
    return _table(signed).to(device)


@functools.cache
def code_borders(signed: bool, device: torch.device) -> Tensor:
    """Return the 255 numbers in the middle between two neighbours of `code_table`, fp32 on a device."""
    table = _table(signed)
    return ((table[1:] + table[:-1]) / 2).to(device)


def decode(codes: Tensor, scales: Tensor, signed: bool, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values of 8-bit codes.

    Args:
        codes: [n] uint8.
        scales: [n / block] fp32.
    """
    table = code_table(signed, codes.device)
    values = table[codes.to(torch.int32)].view(len(scales), -1) * scales.unsqueeze(1)
    return values.view(-1).to(dtype)


def encode(values: Tensor, blocks: int, signed: bool) -> tuple[Tensor, Tensor]:
    """Return the nearest codes of values, [n] uint8, and the scales of their blocks, [blocks] fp32.

    A value above 0 without a sign never becomes 0: a second moment of 0 would make an update infinite.

    Args:
        values: [n], finite.
        blocks: number of equal blocks.
    """
    rows = values.to(torch.float32).view(blocks, -1)
    scales = rows.abs().amax(1)
    units = rows / torch.where(scales > 0, scales, 1.0).unsqueeze(1)
    codes = torch.bucketize(units, code_borders(signed, values.device), out_int32=True)
    if not signed:
        codes = torch.where(rows > 0, codes.clamp(min=1), codes)
    return codes.view(-1).to(torch.uint8), scales


def tensor_number(name: str) -> int:
    """Return an int32 that identifies a tensor by its name (FNV-1a)."""
    value = 0x811C9DC5
    for byte in name.encode():
        value = ((value ^ byte) * 0x01000193) & 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value
