"""The matmuls of a stored matrix besides that of its gradient: y = x Wᵀ + b, and dx = dy W.

`Weight.matmuls` computes them, so that a matrix in another format multiplies in every layer that uses it. No
communication.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class Matmuls:
    """Matmuls of a matrix in its own dtype.

    Args:
        tensor: the weight, [out, in].

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
