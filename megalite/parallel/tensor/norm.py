"""Normalization layers, which accumulate their weight gradients directly in gradient buckets.

A norm over the hidden dimension has whole rows on every tp rank: no communication in forward or backward.
Under sequence parallelism its weight gradient is partial (each rank has a part of the sequence), and so is
that of a norm of heads (each rank has a part of the heads): the specs say so (`ParamSpec`), and the sum over
tp is at the end of the step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from megalite.parallel.compiled_ops import CompiledOps
from megalite.parallel.node import Node, Saved
from megalite.parallel.weight import Weight


class Norm(nn.Module, ABC):
    """Base class of norms over the last dimension: [seq (/tp), batch, …, width] -> the same shape."""

    weight: Weight | None

    def __init__(self, weight: Weight | None, eps: float):
        super().__init__()
        self.weight, self.eps = weight, eps
        self._copy: Tensor | None = None

    @property
    def gain(self) -> Tensor | None:
        """Return the weight, or None if the norm has none."""
        return self.anchor if self._copy is None else self._copy

    @property
    def anchor(self) -> Tensor | None:
        """Return the weight as a leaf of autograd's graph, or None: see `Node`."""
        return None if self.weight is None else self.weight.tensor

    def copy_gain(self) -> None:
        """Use a copy of the weight, which may be freed before the backward."""
        self._copy = None if self.weight is None else self.weight.tensor.detach().clone()

    def forward(self, x: Tensor) -> Tensor:
        return Node.apply(x, self.anchor, self)

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

    def __init__(self, weight: Weight | None, eps: float, offset: float, rounded: bool, ops: CompiledOps):
        super().__init__(weight, eps)
        self.offset, self.rounded, self.ops = offset, rounded, ops

    def compute(self, x: Tensor, saved: Saved) -> Tensor:
        y, rstd = self.ops.rms_norm(x, self.gain, self.eps, self.offset, self.rounded)
        saved.append((x, rstd))
        return y

    def gradient(self, dy: Tensor, saved: Saved, dtotal: Tensor | None = None) -> Tensor:
        """Compute `Norm.gradient`; `dtotal`, the gradient of x from another path, is added."""
        x, rstd = saved.pop()
        dx, dweight = self.ops.rms_norm_backward(dy, x, self.gain, rstd, self.offset, dtotal)
        if self.weight is not None:
            self.weight.accumulate(dweight)
        return dx


class LayerNorm(Norm):
    """(x − mean) / std · (weight + offset), plus the bias if present; without a weight (x − mean) / std.

    No communication.
    """

    def __init__(
        self, weight: Weight | None, bias: Weight | None, eps: float, offset: float, ops: CompiledOps
    ):
        super().__init__(weight, eps)
        self.bias, self.offset, self.ops = bias, offset, ops

    def compute(self, x: Tensor, saved: Saved) -> Tensor:
        bias = None if self.bias is None else self.bias.tensor
        y, mean, rstd = self.ops.layer_norm(x, self.gain, bias, self.eps, self.offset)
        saved.append((x, mean, rstd))
        return y

    def gradient(self, dy: Tensor, saved: Saved, dtotal: Tensor | None = None) -> Tensor:
        """Compute `Norm.gradient`; `dtotal`, the gradient of x from another path, is added."""
        x, mean, rstd = saved.pop()
        dx, dweight, dbias = self.ops.layer_norm_backward(dy, x, self.gain, mean, rstd, self.offset)
        if self.weight is not None:
            self.weight.accumulate(dweight)
        if self.bias is not None:
            self.bias.accumulate(dbias)
        return dx if dtotal is None else dx.add_(dtotal)
