"""Quantized frozen matrices on one rank: their values, and their matmuls (`lora.base`).

    y = x Wᵀ + b        dx = dy W        W = the values of codes and scales, rounded once to the compute dtype

A frozen matrix has no weight gradient, so these two are all. W exists while it is multiplied, and is computed
again in the backward. Where its memory is, says `parallel.quantized.layout`; who fills it,
`parallel.quantized.reading`. No communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from megalite_kernels import nf4
from torch import Tensor

from megalite.mesh.layout import Coordinates
from megalite.parallel.matmuls import Matmuls
from megalite.parallel.quantized.layout import BLOCK, NESTED, Bytes, PartBytes
from megalite.parallel.spec import Segment

if TYPE_CHECKING:
    from megalite_kernels.groups import Groups

    from megalite.parallel.matmuls import Operand

AT_ONCE = 1 << 22
"""Elements whose values are computed at a time, which bounds temporary tensors in fp32."""


class QuantizedPart:
    """A rank's part of a segment: [rows, columns] at an offset of the global matrix [.., width].

    Args:
        memory: the bytes of the bucket, [bytes] uint8. Views of it stay valid while it has no memory.
        place: where the arrays of the part are in it.
    """

    def __init__(self, segment: Segment, at: Coordinates, place: PartBytes, memory: Tensor):
        part = segment.local(at)
        self.segment, self.place = segment, place
        self.width = segment.shape[1]
        (self.first_row, self.first_column), (self.rows, self.columns) = part.offsets, part.shape
        self.codes = memory[slice(*place.codes)]
        scales = memory[slice(*place.scales)]
        self.double = place.offset.size > 0
        self.scales = (scales if self.double else scales.view(torch.float32)).view(self.rows, place.touched)
        self.nested = memory[slice(*place.nested)].view(torch.float32)
        self.offset = memory[slice(*place.offset)].view(torch.float32)
        # whether each row consists of whole blocks
        self.whole_blocks = self.columns == place.touched * BLOCK

    def starts(self, first: int, stop: int) -> Tensor:
        """Return where rows [first, stop) of the part begin in the flattened matrix, [rows] int64."""
        rows = torch.arange(first, stop, device=self.codes.device) + self.first_row
        return rows * self.width + self.first_column

    def first_nested(self) -> int:
        """Return the block of scales that `nested` starts with."""
        return self.first_row * self.width // BLOCK // NESTED

    def blocks(self, first: int, stop: int) -> Tensor:
        """Return the blocks that rows [first, stop) touch in the matrix, [rows, touched] int64."""
        touched = torch.arange(self.place.touched, device=self.codes.device)
        return (self.starts(first, stop) // BLOCK).unsqueeze(1) + touched

    def block_scales(self, first: int, stop: int) -> Tensor:
        """Return the scales of rows [first, stop), [rows, touched] fp32."""
        scales = self.scales[first:stop]
        if not self.double:
            return scales
        index = self.blocks(first, stop) // NESTED - self.first_nested()
        # of the last rows, `scales` may have room for blocks beyond the end of the matrix
        nested = self.nested[index.clamp_(max=len(self.nested) - 1)]
        return nf4.dequantize_scales(scales, nested, self.offset)

    def write_values(self, out: Tensor, first: int, stop: int) -> None:
        """Write the values of rows [first, stop), of which the first is even, to `out` [rows, columns]."""
        count = (stop - first) * self.columns
        packed = self.codes[first * self.columns // 2 : -(-stop * self.columns // 2)]
        values, scales = nf4.values_of(packed, count), self.block_scales(first, stop)
        if self.whole_blocks:
            blocks = values.view(*scales.shape, BLOCK)
            out.copy_(blocks.mul_(scales.unsqueeze(-1)).view(out.shape))
            return
        columns = torch.arange(self.columns, device=out.device)
        index = ((self.starts(first, stop) % BLOCK).unsqueeze(1) + columns) // BLOCK
        out.copy_(values.view(out.shape).mul_(scales.gather(1, index)))

    def in_memory(self, array: Bytes, values: Tensor, first: int = 0) -> tuple[int, Tensor]:
        """Return the bytes of elements of an array from `first` on, and where they are in the bucket."""
        data = values.contiguous().view(-1).view(torch.uint8)
        return array.start + first * values.itemsize, data


class QuantizedMatmuls(Matmuls):
    """Matmuls of a matrix in codes.

    Args:
        tensor: the weight, [out, in], without memory.
        parts: the parts of its segments, one after the other.
    """

    adds_residual = False

    def __init__(self, tensor: Tensor, parts: Sequence[QuantizedPart]):
        super().__init__(tensor)
        self.parts = parts

    def values(self) -> Tensor:
        """Return the values, [out, in], in new memory."""
        tensor = self.tensor
        out, row = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device), 0
        rows = max(AT_ONCE // tensor.shape[1] // 2 * 2, 2)
        for part in self.parts:
            for first in range(0, part.rows, rows):
                stop = min(first + rows, part.rows)
                part.write_values(out[row + first : row + stop], first, stop)
            row += part.rows
        return out

    def forward(self, x: Operand, bias: Tensor | None = None) -> Tensor:
        assert isinstance(x, Tensor)
        return F.linear(x, self.values(), bias)

    def input_gradient(self, grad: Operand) -> Tensor:
        assert isinstance(grad, Tensor)
        return torch.matmul(grad, self.values())

    def add_weight_gradient(
        self, grad: Tensor, grad_output: Tensor, inputs: Operand, groups: Groups | None, overwrite: bool
    ) -> None:
        raise AssertionError("a quantized matrix is frozen")
