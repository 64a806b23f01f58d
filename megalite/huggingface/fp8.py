"""Weights in fp8 with a scale per block of 128 x 128, as in DeepSeek-V3, read in bf16.

A matrix NAME is two tensors in the files: NAME [rows, columns] in float8_e4m3fn, and NAME_scale_inv [⌈rows /
128⌉, ⌈columns / 128⌉], which its blocks are multiplied by. As in DeepSeek's own conversion the product is
computed in fp32 and rounded to bf16. Other tensors are read as they are.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from megalite.huggingface.files import ConversionError, TensorFiles

BLOCK = 128
SCALES = "_scale_inv"
NAN = 0x7F  # without its sign
_SCALE_TYPES = (torch.float32, torch.bfloat16, torch.float8_e8m0fnu)


def dequantized(weight: Tensor, scales: Tensor) -> Tensor:
    """Dequantize [rows, columns] in fp8 with block scales to bf16."""
    out = torch.empty(weight.shape, dtype=torch.bfloat16)
    # [blocks of rows, columns]
    factors = (scales.float() * 2**8).repeat_interleave(BLOCK, dim=1)[:, : weight.shape[1]]
    # no copy of the whole matrix in fp32
    for into, rows, own in zip(out.split(BLOCK), weight.split(BLOCK), factors, strict=True):
        torch.mul(_scaled_down(rows), own, out=into)
    return out


def _scaled_down(codes: Tensor) -> Tensor:
    """Return fp8 numbers times 2 ** -8 in fp32.

    This is faster than a cast: shifted left by seven bits, they are fp16 numbers, whose exponent has one bit
    more and a bias that is larger by 8. NaN becomes 480 * 2 ** -8.
    """
    bits = codes.view(torch.int8).to(torch.int16) << 7  # with the sign twice
    return (bits & ~(1 << 14)).view(torch.float16).float()


class Fp8Tensors(TensorFiles):
    """The tensors of a directory, with fp8 matrices dequantized under their own names.

    Raises ConversionError naming a matrix whose scales do not match it.
    """

    def __init__(self, weights: TensorFiles):
        self.directory, self._files = weights.directory, weights._files
        self._names = dict.fromkeys(name for name in weights if not name.endswith(SCALES))
        self.quantized = {name.removesuffix(SCALES) for name in weights if name.endswith(SCALES)}
        # an import reads a matrix in several blocks of rows
        self._last = lru_cache(maxsize=1)(self._dequantized)
        for name in sorted(
            self.quantized | {name for name in self._names if self._type(name) is torch.float8_e4m3fn}
        ):
            self._check(name)

    def __getitem__(self, name: str) -> Tensor:
        return self._last(name) if name in self.quantized else super().__getitem__(name)

    def _dequantized(self, name: str) -> Tensor:
        return self.rows(name, 0, self.shape(name)[0])

    def rows(self, name: str, first: int, stop: int) -> Tensor:
        if name not in self.quantized:
            return super().rows(name, first, stop)
        block = first // BLOCK
        scales = self._files[name + SCALES][name + SCALES][block : -(-stop // BLOCK)].float()
        if not (scales.isfinite() & (scales >= 0)).all():
            raise ConversionError(
                f"{self.directory} is damaged: {name}{SCALES} contains a negative or NaN scale"
            )
        codes = self._files[name][name][block * BLOCK : stop]
        if (codes.view(torch.int8) & NAN).eq(NAN).any():
            raise ConversionError(f"{self.directory} is damaged: {name} contains NaN")
        return dequantized(codes, scales)[first - block * BLOCK :]

    def _check(self, name: str) -> None:
        for each in (name, name + SCALES):
            if each not in self._files:
                raise ConversionError(
                    f"{self.directory}: {each} is missing. Each fp8 matrix requires a tensor of scales and "
                    "vice versa."
                )
        shape, scales = self.shape(name), self.shape(name + SCALES)
        if self._type(name) is not torch.float8_e4m3fn or self._type(name + SCALES) not in _SCALE_TYPES:
            types = f"{name} has type {self._type(name)} with scales of type {self._type(name + SCALES)}"
            raise ConversionError(
                f"{self.directory}: {types}. Only torch.float8_e4m3fn with floating-point scales is "
                "supported."
            )
        blocks = tuple(-(-size // BLOCK) for size in shape)
        if len(shape) != 2 or scales != blocks:
            raise ConversionError(
                f"{self.directory}: {name}{SCALES} has shape {list(scales)}, expected {list(blocks)} for "
                f"{name} {list(shape)} with blocks of 128 x 128. Other scales are not supported; use the "
                "bf16 weights."
            )

    def _type(self, name: str) -> torch.dtype:
        return self._files[name].dtype(name)
