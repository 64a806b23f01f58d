"""Normalization layers, which accumulate their weight gradients directly in gradient buckets.

A norm over the hidden dimension has whole rows on every tp rank: no communication in forward or backward.
Under sequence parallelism its weight gradient is partial (each rank has a part of the sequence), and so is
that of a norm of heads (each rank has a part of the heads): the specs say so (`ParamSpec`), and the sum over
tp is at the end of the step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from megalite.parallel.compiled_ops import CompiledOps
from megalite.parallel.node import Node, Saved
from megalite.parallel.tensor.norm_weights import NormWeight


class Norm(ABC):
    """Base class of norms over the last dimension: [seq (/tp), batch, …, width] -> the same shape."""

    def __init__(self, weight: NormWeight, eps: float):
        self.weight, self.eps = weight, eps

    def __call__(self, x: Tensor) -> Tensor:
        return Node.apply(x, self.weight.tensor, self)

    @abstractmethod
    def compute(self, x: Tensor, saved: Saved) -> Tensor:
        """Return the normalized x, and save x and its statistics."""

    @abstractmethod
    def gradient(self, dy: Tensor, saved: Saved) -> Tensor:
        """Return the gradient of x, and accumulate those of the weights."""


class RMSNorm(Norm):
    """x / rms(x) · (weight + offset) (Zhang and Sennrich 2019), or without a weight x / rms(x).

    No communication.

    Args:
        rounded: as in `megalite_kernels.norm.rms_norm`.
    """

    def __init__(self, weight: NormWeight, eps: float, offset: float, rounded: bool, ops: CompiledOps):
        super().__init__(weight, eps)
        self.offset, self.rounded, self.ops = offset, rounded, ops

    def compute(self, x: Tensor, saved: Saved) -> Tensor:
        y, rstd = self.ops.rms_norm(x, self.weight.tensor, self.eps, self.offset, self.rounded)
        saved.append((x, rstd))
        return y

    def gradient(self, dy: Tensor, saved: Saved, dtotal: Tensor | None = None) -> Tensor:
        """Compute `Norm.gradient`; `dtotal`, the gradient of x from another path, is added."""
        x, rstd = saved.pop()
        dx, dweight = self.ops.rms_norm_backward(dy, x, self.weight.tensor, rstd, self.offset, dtotal)
        self.weight.accumulate(dweight)
        return dx


class LayerNorm(Norm):
    """(x − mean) / std · (weight + offset), plus the bias if present; without a weight (x − mean) / std.

    No communication.
    """

    def __init__(
        self, weight: NormWeight, bias: NormWeight | None, eps: float, offset: float, ops: CompiledOps
    ):
        super().__init__(weight, eps)
        self.bias, self.offset, self.ops = bias, offset, ops

    def compute(self, x: Tensor, saved: Saved) -> Tensor:
        bias = None if self.bias is None else self.bias.tensor
        y, mean, rstd = self.ops.layer_norm(x, self.weight.tensor, bias, self.eps, self.offset)
        saved.append((x, mean, rstd))
        return y

    def gradient(self, dy: Tensor, saved: Saved, dtotal: Tensor | None = None) -> Tensor:
        """Compute `Norm.gradient`; `dtotal`, the gradient of x from another path, is added."""
        x, mean, rstd = saved.pop()
        dx, dweight, dbias = self.ops.layer_norm_backward(dy, x, self.weight.tensor, mean, rstd, self.offset)
        self.weight.accumulate(dweight)
        if self.bias is not None:
            self.bias.accumulate(dbias)
        return dx if dtotal is None else dx.add_(dtotal)
