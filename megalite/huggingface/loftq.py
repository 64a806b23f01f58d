"""Adapters that start at what quantization has lost (`lora.start: loftq`; LoftQ, Li et al. 2023).

One iteration: with W = Q + R, Q the values of the quantized base, the best approximation of R of rank r is
U S V from its singular values. B A · scale starts there, shared evenly: A = √S V, and B = U √S / scale.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from megalite.checkpoint.manifest import WEIGHT
from megalite.config.schema import Config
from megalite.huggingface.base_weights import BaseWeights, quantized_matrices
from megalite.huggingface.files import ConversionError
from megalite.model.adapter_parameters import A, B, name_of
from megalite.parallel.quantized.layout import BaseForm
from megalite.parallel.spec import Rectangle, Segment


class LoftqStart:
    """A and B of each adapted matrix, and of each expert. A rank decomposes those whose adapters it has."""

    def __init__(self, config: Config, base: BaseWeights):
        self.lora, self.base = config.lora, base
        self.form = BaseForm(config.lora.base, config.lora.double_quant)
        self._matrices = {
            WEIGHT + name_of(name, part): (matrix, part)
            for name, (matrix, _) in quantized_matrices(config).items()
            if self.lora.adapts(matrix.role)
            for part in (A, B)
        }
        self._factors: dict[tuple[str, int], dict[str, Tensor]] = {}

    @torch.no_grad()
    def fill(self, rectangles: Iterable[Rectangle]) -> None:
        """Fill rectangles of adapters; others are left alone. Raises CheckpointError."""
        for part in rectangles:
            if part.name in self._matrices:
                matrix, half = self._matrices[part.name]
                (first, column), (rows, columns) = part.offsets, part.tensor.shape
                # of an expert
                length = self.lora.rank_of(matrix.role) if half == A else matrix.shape[0] // matrix.experts
                for expert in range(first // length, -(-(first + rows) // length)):
                    start = expert * length
                    low, high = max(first, start), min(first + rows, start + length)
                    if factors := self._of(matrix, expert):
                        factor = factors[half][low - start : high - start]
                        part.tensor[low - first : high - first] = factor[:, column : column + columns]

    def _of(self, matrix: Segment, expert: int) -> dict[str, Tensor]:
        """Return A and B of an expert; nothing if nothing is lost: of zeros neither would have a gradient."""
        if (key := (matrix.name, expert)) not in self._factors:
            length = matrix.shape[0] // matrix.experts
            rows = expert * length, (expert + 1) * length
            lost = self.base.rows(matrix, *rows) - self.base.quantized(matrix, self.form, *rows)
            rank, scale = self.lora.rank_of(matrix.role), self.lora.scale_of(matrix.role)
            self._factors[key] = decomposed(matrix.name, lost, rank, scale) if lost.any() else {}
        return self._factors[key]


def decomposed(name: str, residual: Tensor, rank: int, scale: float) -> dict[str, Tensor]:
    """Return A [rank, in] and B [out, rank] with B A · scale the best approximation of a matrix, in fp32.

    Of each singular vector the largest element of U is positive, so that the result is unique.

    Raises ConversionError if the matrix, which `name` names, has fewer rows or columns than the rank.
    """
    if rank > (most := min(residual.shape)):
        raise ConversionError(
            f"the rank {rank} of adapters is more than {name} has, {' x '.join(map(str, residual.shape))}. "
            f"Choose at most {most}, or set lora.start to default."
        )
    u, s, v = torch.linalg.svd(residual, full_matrices=False)
    u, root, v = u[:, :rank], s[:rank].sqrt(), v[:rank]
    sign = torch.sign(u.gather(0, u.abs().argmax(0, keepdim=True))).view(-1)
    return {A: (root * sign).unsqueeze(1) * v, B: u * (root * sign) / scale}
