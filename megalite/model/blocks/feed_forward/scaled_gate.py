"""The activation of a feed-forward with a factor on its gate (Falcon-H1). No communication."""

from __future__ import annotations

from torch import Tensor

from megalite.parallel.compiled_ops import CompiledOps
from megalite.parallel.tensor.linear import Activation


class ScaledGate(Activation):
    """act(factor · gate) · up on a packed [gate | up] input."""

    def __init__(self, name: str, factor: float, ops: CompiledOps):
        super().__init__(name, True, ops)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self._scaled(x))

    def backward(self, grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        dx, active = super().backward(grad, self._scaled(x))
        dx.chunk(2, -1)[0].mul_(self.factor)
        return dx, active

    def _scaled(self, x: Tensor) -> Tensor:
        scaled = x.clone()
        scaled.chunk(2, -1)[0].mul_(self.factor)
        return scaled
