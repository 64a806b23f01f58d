"""Weights in MXFP4 (OCP Microscaling Formats 1.0), as gpt-oss stores its experts, read in bf16.

32 consecutive inputs of a row share a scale, 2 ** (byte − 127); each is 4 bits of E2M1, two in a byte, the
first one in the low bits. A tensor NAME is two in the files: NAME_blocks [experts, rows, groups, 16] and
NAME_scales [experts, rows, groups], both uint8. What is read has the shape of the same tensor in bf16,
[experts, columns, rows].
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalite.huggingface.files import TensorFiles

BLOCKS, SCALES = "_blocks", "_scales"
_HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# of the 16 numbers that 4 bits are
VALUES = torch.tensor([*_HALF, *(-value for value in _HALF)], dtype=torch.bfloat16)


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """Dequantize uint8 […, groups, 16] with scales […, groups] to bf16 […, groups · 32].

    The result is exact: bf16 has more bits than E2M1, and the same exponents.
    """
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2).long()  # […, groups, 32]
    return torch.ldexp(VALUES[codes], scales.unsqueeze(-1).int() - 127).flatten(-2)


class Mxfp4Tensors(TensorFiles):
    """The tensors of a directory, with MXFP4 tensors dequantized under their own names."""

    def __init__(self, weights: TensorFiles):
        self.directory, self._files = weights.directory, weights._files
        self.quantized = [name.removesuffix(BLOCKS) for name in weights if name.endswith(BLOCKS)]
        parts = {f"{name}{end}" for name in self.quantized for end in (BLOCKS, SCALES)}
        self._names = dict.fromkeys([*(name for name in weights if name not in parts), *self.quantized])

    def __getitem__(self, name: str) -> Tensor:
        return (
            self.experts(name, 0, self.shape(name)[0])
            if name in self.quantized
            else super().__getitem__(name)
        )

    def experts(self, name: str, first: int, stop: int) -> Tensor:
        if name not in self.quantized:
            return super().experts(name, first, stop)
        blocks, scales = (self._files[f"{name}{end}"][f"{name}{end}"][first:stop] for end in (BLOCKS, SCALES))
        return dequantized(blocks, scales).transpose(1, 2)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self.quantized:
            return super().shape(name)
        experts, rows, groups, size = super().shape(f"{name}{BLOCKS}")
        return experts, groups * size * 2, rows
