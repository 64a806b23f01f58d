"""Names the operand of an fp8 matmul that is not finite, when a step is bad.

An infinite or NaN element makes its block NaN, and with it the loss or the gradients, so that the step is
skipped. Which operand was the first one is known from the scales: each step adds a number for each operand to
the sums that it makes over all ranks anyway. No communication.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megalite.model.statistics import CAUSE
from megalite.parallel.fp8 import OPERANDS, Fp8Matmuls
from megalite.parallel.spec import Rectangle
from megalite.parallel.weight import Weights


class FiniteOperands:
    """Number of ranks on which an operand was not finite, for each operand, as `ModelStatistics`.

    Args:
        names: the stored matrices of the whole model that multiply in fp8, in the order of its layers.
        weights: those of this rank.
    """

    def __init__(self, names: Sequence[str], weights: Weights, device: torch.device):
        self.names, self.size = names, len(names) * len(OPERANDS)
        self._own: list[tuple[int, Fp8Matmuls]] = []
        for index, name in enumerate(names):
            if name in weights:
                matmuls = weights[name].matmuls
                assert isinstance(matmuls, Fp8Matmuls)
                self._own.append((index, matmuls))
        self._zeros = torch.zeros(self.size, dtype=torch.float64, device=device)
        self._places, self._index = list[int](), torch.zeros(0, dtype=torch.int64, device=device)

    def own(self, statistics: Mapping[str, Tensor]) -> Tensor:
        places, largest = list[int](), list[Tensor]()
        for index, matmuls in self._own:
            for column, operand in enumerate(OPERANDS):
                # codes of a weight are kept, and their scales with them
                scale = matmuls.largest_scales.get(operand)
                if operand != "w":
                    matmuls.largest_scales.pop(operand, None)
                if scale is not None:
                    places.append(len(OPERANDS) * index + column)
                    largest.append(scale)
        if not places:
            return self._zeros
        if places != self._places:  # copied to the device once
            self._places, self._index = places, torch.tensor(places, device=self._zeros.device)
        scales = torch.stack(largest)
        wrong = scales == 255 if scales.dtype == torch.uint8 else ~scales.isfinite()
        return self._zeros.index_add(0, self._index, wrong.double())

    def learn(self, totals: Tensor, tokens: int, applied: bool) -> dict[str, Any]:
        """Return the cause of a bad step under `CAUSE`; an operand that is finite has no metric.

        A value that is not finite spreads through the forward and then back through the backward, so that the
        cause is the first matrix in the forward, or the last one, if only gradients were not finite.
        """
        wrong = totals.view(-1, len(OPERANDS)).bool()
        if applied or not wrong.any():
            return {}
        forward = wrong[:, :2].any(1).nonzero().flatten().tolist()
        if forward:
            matrix, operands = forward[0], [OPERANDS[i] for i in wrong[forward[0], :2].nonzero().flatten()]
        else:
            matrix, operands = int(wrong[:, 2].nonzero()[-1]), ["dy"]
        return {CAUSE: f"{' and '.join(operands)} of {self.names[matrix]}"}

    def learned(self) -> list[Rectangle]:
        return []

    def rectangles(self) -> Iterator[Rectangle]:
        return iter(())
