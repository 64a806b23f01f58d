"""The matmuls of a stored matrix: y = x Wᵀ + b, dx = dy W, and dW = dyᵀ x.

`Weight.matmuls` computes them, so that a matrix in another format multiplies in every layer that uses it. No
communication.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from megalite_kernels.fp8 import Quantized
    from megalite_kernels.groups import Groups

    Operand = Tensor | Quantized
    """What a matmul reads: a tensor, or its codes with their scales."""


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

    def values(self) -> Tensor:
        """Return the values of the weight, [out, in]."""
        return self.tensor

    def forward(self, x: Operand, bias: Tensor | None = None) -> Tensor:
        """Return x Wᵀ + b, [.., in] -> [.., out].

        Args:
            x: the input, or `forward_operand` of it.
        """
        assert isinstance(x, Tensor)
        return F.linear(x, self.tensor, bias)

    def input_gradient(self, grad: Operand) -> Tensor:
        """Return dy W, [.., out] -> [.., in].

        Args:
            grad: the gradient of the output, or `input_gradient_operand` of it.
        """
        assert isinstance(grad, Tensor)
        return torch.matmul(grad, self.tensor)

    def add_weight_gradient(
        self, grad: Tensor, grad_output: Tensor, inputs: Operand, groups: Groups | None, overwrite: bool
    ) -> None:
        """Compute grad (+)= grad_outputᵀ · inputs.

        Args:
            grad: [out, in], in at least fp32 or the dtype of the others.
            grad_output: [tokens, out].
            inputs: [tokens, in], or `weight_gradient_operand` of them.
            groups: number of tokens of each of the experts that are stacked in the weight.
        """
        assert isinstance(inputs, Tensor)
        left = grad_output.t()  # [out, tokens]
        if groups is not None:  # one matmul for each expert
            from megalite_kernels.grouped_weight_grad import add_grouped_gradient

            each = grad.view(len(groups), -1, grad.shape[1])
            add_grouped_gradient(each, grad_output, inputs, groups, overwrite)
        elif left.dtype != grad.dtype and left.is_cuda:
            # the matmul's fp32 accumulators are added to grad without being rounded first
            from megalite_kernels.weight_grad import add_matmul

            add_matmul(grad, left, inputs, overwrite=overwrite)
        elif left.dtype != grad.dtype:  # CPU: addmm has no out_dtype
            add(grad, left @ inputs, overwrite)
        elif overwrite:
            torch.mm(left, inputs, out=grad)
        else:
            grad.addmm_(left, inputs)

    def forward_operand(self, x: Tensor) -> Operand:
        """Return what `forward` reads of x, if that is less than x, otherwise x."""
        return x

    def input_gradient_operand(self, grad: Tensor) -> Operand:
        """Return what `input_gradient` reads of the gradient, as `forward_operand`."""
        return grad

    def weight_gradient_operand(self, inputs: Tensor) -> Operand:
        """Return what `add_weight_gradient` reads of the inputs, as `forward_operand`."""
        return inputs


def add(grad: Tensor, value: Tensor, overwrite: bool) -> None:
    """Add a value to grad, or overwrite it: zeroing it first would round differently."""
    if overwrite:
        grad.copy_(value)
    else:
        grad.add_(value)
