"""The matmuls of a stored matrix besides that of its gradient: y = x Wᵀ + b, and dx = dy W.

`Weight.matmuls` computes them, so that a matrix in another format multiplies in every layer that uses it. No
communication.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from megalite_kernels.groups import Groups


class Matmuls:
    """Matmuls of a matrix in its own dtype.

    Args:
        tensor: the weight, [out, in], or the stacked matrices of several experts, [experts · out, in].

    Attributes:
        adds_residual: whether a matmul may add its result to another tensor in the same kernel.
    """

    adds_residual = True

    def __init__(self, tensor: Tensor):
        self.tensor = tensor

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x Wᵀ + b, [.., in] -> [.., out]."""
        return F.linear(x, self.tensor, bias)

    def input_gradient(self, grad: Tensor) -> Tensor:
        """Return dy W, [.., out] -> [.., in]."""
        return torch.matmul(grad, self.tensor)

    def experts_forward(self, rows: Tensor, groups: Groups) -> Tensor:
        """Return the product of each expert's rows with its matrix: [n, in] -> [n, out].

        Args:
            groups: the number of rows of each expert, in whose order they are sorted.
        """
        from megalite.parallel.expert.grouped_matmul import grouped_matmul

        return grouped_matmul(rows, self._each(self.tensor, groups).transpose(1, 2), groups)

    def experts_input_gradient(self, grad: Tensor, groups: Groups) -> Tensor:
        """Return the gradient of the rows of `experts_forward`: [n, out] -> [n, in]."""
        from megalite.parallel.expert.grouped_matmul import grouped_matmul

        return grouped_matmul(grad, self._each(self.tensor, groups), groups)

    @staticmethod
    def _each(matrices: Tensor, groups: Groups) -> Tensor:
        """View stacked matrices as [experts, out, in]."""
        return matrices.view(len(groups), -1, matrices.shape[1])
