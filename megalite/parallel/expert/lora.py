"""The low-rank adapters of a layer's experts (LoRA): y_e += scale · B_e A_e x for the rows of each expert e.
No communication.

All experts of a stored tensor have one rank. Gate and up of an expert have one A together, as in PEFT's
adapters of fused parameters.
"""

from __future__ import annotations

from megalite_kernels.groups import Groups
from torch import Tensor

from megalite.parallel.expert.grouped_matmul import grouped_matmul
from megalite.parallel.weight import Weight


class ExpertAdapter:
    """The adapters of this rank's experts in one stored tensor.

    Args:
        a: their A's, [experts · rank, in].
        b: their B's, [experts · out, rank].
        scale: the factor on B A.
    """

    def __init__(self, a: Weight, b: Weight, scale: float):
        self.a, self.b, self.scale = a, b, scale
        self.number = a.tensor.shape[0] // b.tensor.shape[1]

    def add(self, rows: Tensor, out: Tensor, groups: Groups) -> Tensor:
        """Add scale · B A rows to `out` ([n, in], [n, out], sorted by expert). Returns scale · A rows, [n,
        rank]."""
        low = grouped_matmul(rows, self._each(self.a).transpose(1, 2), groups).mul_(self.scale)
        out.add_(grouped_matmul(low, self._each(self.b).transpose(1, 2), groups))
        return low

    def add_gradient(self, grad: Tensor, drows: Tensor, groups: Groups) -> Tensor:
        """Add the gradient of the rows through B A to `drows`, given that of the output. Returns that of A
        rows, [n, rank]."""
        dlow = grouped_matmul(grad, self._each(self.b), groups).mul_(self.scale)
        drows.add_(grouped_matmul(dlow, self._each(self.a), groups))
        return dlow

    def accumulate(self, grad: Tensor, rows: Tensor, low: Tensor, dlow: Tensor, groups: Groups) -> None:
        """Accumulate both weight gradients, from what the two other methods were given and have returned."""
        self.a.accumulate_matmul(dlow, rows, groups)
        self.b.accumulate_matmul(grad, low, groups)

    def _each(self, weight: Weight) -> Tensor:
        return weight.tensor.view(self.number, -1, weight.tensor.shape[1])
