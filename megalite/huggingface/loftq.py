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
from megalite.huggingface.base_weights import BaseWeights
from megalite.model.adapter_parameters import A, B, name_of
from megalite.model.parameters import model_specs
from megalite.parallel.quantized.layout import BaseForm
from megalite.parallel.spec import Rectangle, Segment


class LoftqStart:
    """A and B of each adapted matrix. A rank decomposes the matrices whose adapters it has."""

    def __init__(self, config: Config, base: BaseWeights):
        self.lora, self.base = config.lora, base
        self.form = BaseForm(config.lora.base, config.lora.double_quant)
        adapted = (each for spec in model_specs(config.model) for each in spec.segments)
        self._matrices = {
            WEIGHT + name_of(each.name, part): (each, part)
            for each in adapted
            if self.lora.adapts(each.role)
            for part in (A, B)
        }
        self._factors: dict[str, dict[str, Tensor]] = {}

    @torch.no_grad()
    def fill(self, rectangles: Iterable[Rectangle]) -> None:
        """Fill rectangles of adapters; others are left alone. Raises CheckpointError."""
        for part in rectangles:
            if part.name in self._matrices:
                matrix, half = self._matrices[part.name]
                bounds = zip(part.offsets, part.tensor.shape, strict=True)
                part.tensor.copy_(self._of(matrix)[half][tuple(slice(at, at + size) for at, size in bounds)])

    def _of(self, matrix: Segment) -> dict[str, Tensor]:
        if matrix.name not in self._factors:
            values = self.base.rows(matrix, 0, matrix.shape[0])
            quantized = self.base.quantized(matrix, self.form)
            self._factors[matrix.name] = decomposed(
                values - quantized, self.lora.rank_of(matrix.role), self.lora.scale_of(matrix.role)
            )
        return self._factors[matrix.name]


def decomposed(residual: Tensor, rank: int, scale: float) -> dict[str, Tensor]:
    """Return A [rank, in] and B [out, rank] with B A · scale the best approximation of a matrix, in fp32.

    Of each singular vector the largest element of U is positive, so that the result is unique.
    """
    u, s, v = torch.linalg.svd(residual, full_matrices=False)
    u, root, v = u[:, :rank], s[:rank].sqrt(), v[:rank]
    sign = torch.sign(u.gather(0, u.abs().argmax(0, keepdim=True))).view(-1)
    return {A: (root * sign).unsqueeze(1) * v, B: u * (root * sign) / scale}
