"""The activation of a feed-forward with two trained numbers (Apertus): xIELU.

Each tp rank has the activation of its own channels, so its gradients of both numbers are partial sums.
No communication.
"""

from __future__ import annotations

from torch import Tensor

from megalite.parallel.compiled_ops import CompiledOps
from megalite.parallel.tensor.linear import Activation
from megalite.parallel.weight import Weight


class XIELU(Activation):
    """xIELU of [seq, batch, intermediate/tp] (`megalite_kernels.xielu`).

    Backward accumulates the gradients of both numbers.
    """

    def __init__(self, alpha_p: Weight, alpha_n: Weight, ops: CompiledOps):
        self.alpha_p, self.alpha_n, self.ops = alpha_p, alpha_n, ops

    def forward(self, x: Tensor) -> Tensor:
        active: Tensor = self.ops.xielu_forward(x, self.alpha_p.tensor, self.alpha_n.tensor)
        return active

    def backward(self, grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        alphas = self.alpha_p.tensor, self.alpha_n.tensor
        dx, dalpha_p, dalpha_n, active = self.ops.xielu_backward(grad, x, *alphas)
        self.alpha_p.accumulate(dalpha_p)
        self.alpha_n.accumulate(dalpha_n)
        return dx, active
