"""Quantized frozen matrices on one rank: their values, and their matmuls (`lora.base`).

    y = x Wᵀ + b        dx = dy W        W = the values of codes and scales, rounded once to the compute dtype

A frozen matrix has no weight gradient, so these two are all. On a GPU a kernel computes the values tile by
tile (`block_matmul_triton`). Elsewhere, and where rows are not whole blocks, W exists while it is multiplied,
and is computed again in the backward. Where its memory is, says `parallel.quantized.layout`; who fills it,
`parallel.quantized.reading`. No communication.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from megalite_kernels import nf4
from megalite_kernels.backend import takes_triton
from megalite_kernels.block_formats import FORMATS, code_values
from torch import Tensor

from megalite.mesh.layout import Coordinates
from megalite.parallel.expert.grouped_matmul import ExpertMatmuls
from megalite.parallel.matmuls import Matmuls
from megalite.parallel.quantized.layout import NESTED, BaseForm, Bytes, PartBytes
from megalite.parallel.spec import Segment

if TYPE_CHECKING:
    from megalite_kernels.groups import Groups

    from megalite.parallel.matmuls import Operand

MULTIPLE = 128
"""Of which the kernels need the columns of a matrix to be a multiple."""
IN_KERNEL = (torch.bfloat16, torch.float16)
"""Dtypes that the kernels multiply: in fp32 they would spill registers."""
AT_ONCE = 1 << 20
"""Elements whose values are computed at a time, which bounds temporary tensors in fp32."""


class QuantizedPart:
    """A rank's part of a segment: [rows, columns] at an offset of the global matrix [.., width].

    Args:
        memory: the bytes of the bucket, [bytes] uint8. Views of it stay valid while it has no memory.
        place: where the arrays of the part are in it.

    Attributes:
        block: number of elements of a block.
    """

    def __init__(self, segment: Segment, at: Coordinates, form: BaseForm, place: PartBytes, memory: Tensor):
        part = segment.local(at)
        self.segment, self.place, self.form, self.double = segment, place, form, form.double
        self.memory = memory
        self.width = segment.shape[1]
        self.block, self.format = form.block(self.width), FORMATS[form.name]
        (self.first_row, self.first_column), (self.rows, self.columns) = part.offsets, part.shape
        self.codes, self.codes_in_byte = memory[slice(*place.codes)], form.sizes.codes
        scales = memory[slice(*place.scales)]
        dtype = torch.uint8 if self.double else self.format.scale_dtype
        self.scales = scales.view(dtype).view(self.rows, place.touched)
        self.nested = memory[slice(*place.nested)].view(torch.float32)
        self.offset = memory[slice(*place.offset)].view(torch.float32)
        # whether each row consists of whole blocks
        self.whole_blocks = self.columns == place.touched * self.block

    def starts(self, first: int, stop: int) -> Tensor:
        """Return where rows [first, stop) of the part begin in the flattened matrix, [rows] int64."""
        rows = torch.arange(first, stop, device=self.codes.device) + self.first_row
        return rows * self.width + self.first_column

    def first_nested(self) -> int:
        """Return the block of scales that `nested` starts with."""
        return self.first_row * self.width // self.block // NESTED

    def blocks(self, first: int, stop: int) -> Tensor:
        """Return the blocks that rows [first, stop) touch in the matrix, [rows, touched] int64."""
        touched = torch.arange(self.place.touched, device=self.codes.device)
        return (self.starts(first, stop) // self.block).unsqueeze(1) + touched

    def block_scales(self, first: int, stop: int) -> Tensor:
        """Return the scales of rows [first, stop), [rows, touched] fp32."""
        scales = self.scales[first:stop]
        if not self.double:
            return self.format.scales(scales)
        index = self.blocks(first, stop) // NESTED - self.first_nested()
        # of the last rows, `scales` may have room for blocks beyond the end of the matrix
        nested = self.nested[index.clamp_(max=len(self.nested) - 1)]
        return nf4.dequantize_scales(scales, nested, self.offset)

    def packed(self, start: int, end: int) -> tuple[Tensor, int]:
        """Return the bytes of codes [start, end), and how many codes to skip in the first byte."""
        return self.codes[
            start // self.codes_in_byte : -(-end // self.codes_in_byte)
        ], start % self.codes_in_byte

    def write_values(self, out: Tensor, first: int) -> None:
        """Write the values of the rows from `first` on to `out` [rows, columns]."""
        rows = max(AT_ONCE // self.columns, 1)
        for row in range(0, len(out), rows):
            self._write_some(out[row : row + rows], first + row)

    def _write_some(self, out: Tensor, first: int) -> None:
        stop, (start, end) = first + len(out), (first * self.columns, (first + len(out)) * self.columns)
        packed, skipped = self.packed(start, end)
        values = self.format.values(packed, skipped, end - start)
        scales = self.block_scales(first, stop)
        if self.whole_blocks:
            blocks = values.view(*scales.shape, self.block)
            out.copy_(blocks.mul_(scales.unsqueeze(-1)).view(out.shape))
            return
        columns = torch.arange(self.columns, device=out.device)
        index = ((self.starts(first, stop) % self.block).unsqueeze(1) + columns) // self.block
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

    def in_kernel(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, str, int] | None:
        """Return what the kernels read of the matrix to multiply x: codes, scales in fp32, values of codes.

        None: they do not run for x, or rows are not whole blocks.
        """
        first, last, width = self.parts[0], self.parts[-1], self.tensor.shape[1]
        whole = width % MULTIPLE == 0 and all(part.whole_blocks for part in self.parts)
        if not whole or x.dtype not in IN_KERNEL or not takes_triton(x):
            return None
        codes = first.memory[first.place.codes.start : last.place.codes.stop]
        scales = torch.cat([part.block_scales(0, part.rows) for part in self.parts])
        block = 0 if first.form.sizes.block is None else first.block
        return codes, scales, code_values(first.form.name, x.device), first.form.name, block

    def values(self) -> Tensor:
        """Return the values, [out, in], in new memory."""
        out = self.tensor.new_empty(self.tensor.shape)
        for part, own in zip(self.parts, out.split([part.rows for part in self.parts]), strict=True):
            part.write_values(own, 0)
        return out

    def forward(self, x: Operand, bias: Tensor | None = None) -> Tensor:
        assert isinstance(x, Tensor)
        if (matrix := self.in_kernel(x)) is None:
            return F.linear(x, self.values(), bias)
        from megalite_kernels.block_matmul_triton import block_matmul

        out = block_matmul(x.reshape(-1, x.shape[-1]), *matrix).view(*x.shape[:-1], -1)
        return out if bias is None else out.add_(bias)

    def input_gradient(self, grad: Operand) -> Tensor:
        assert isinstance(grad, Tensor)
        if (matrix := self.in_kernel(grad)) is None:
            return torch.matmul(grad, self.values())
        from megalite_kernels.block_matmul_triton import block_transposed_matmul

        rows = grad.reshape(-1, grad.shape[-1])
        return block_transposed_matmul(rows, *matrix).view(*grad.shape[:-1], -1)

    def add_weight_gradient(
        self, grad: Tensor, grad_output: Tensor, inputs: Operand, groups: Groups | None, overwrite: bool
    ) -> None:
        raise AssertionError("a quantized matrix is frozen")


class QuantizedExpertMatmuls(QuantizedMatmuls, ExpertMatmuls):
    """Matmuls of the stacked matrices of experts in codes. One matrix at a time has values.

    On a GPU the host waits for the numbers of rows.
    """

    def experts_forward(self, rows: Tensor, groups: Groups) -> Tensor:
        out = rows.new_empty(len(rows), len(self.tensor) // len(groups))
        for own, into, matrix in self._each_used(rows, out, groups):
            torch.mm(own, matrix.t(), out=into)
        return out

    def experts_input_gradient(self, grad: Tensor, groups: Groups) -> Tensor:
        out = grad.new_empty(len(grad), self.tensor.shape[1])
        for own, into, matrix in self._each_used(grad, out, groups):
            torch.mm(own, matrix, out=into)
        return out

    def _each_used(
        self, rows: Tensor, out: Tensor, groups: Groups
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield the rows, the rows of the result and the values of each expert that has rows."""
        ((part,), length) = self.parts, len(self.tensor) // len(groups)
        for number, (own, into) in enumerate(zip(groups.split(rows), groups.split(out), strict=True)):
            if len(own):
                matrix = self.tensor.new_empty(length, self.tensor.shape[1])
                part.write_values(matrix, number * length)
                yield own, into, matrix
