"""Attention sinks of the heads that a context-parallel rank processes.

These may be a subset of the heads of its tp rank. Every cp rank computes the gradient for its own queries or
heads, which is zero for other heads; the sum over cp is part of the sum of all weight gradients. This module
does no communication.
"""

from __future__ import annotations

from typing import Protocol

from megalite_kernels.attention_sinks import join, sinks_gradient
from torch import Tensor

from megalite.mesh.mesh import MeshAxis
from megalite.parallel.weight import Weight


class Sinks(Protocol):
    """One number per head: a `Weight`, or a part of one."""

    @property
    def tensor(self) -> Tensor: ...

    def accumulate(self, value: Tensor) -> None: ...


def with_sinks(out: Tensor, lse: Tensor, sinks: Sinks | None) -> tuple[Tensor, Tensor]:
    """Add the sinks, if any, to the softmax, and return the new output and log-sum-exp."""
    return (out, lse) if sinks is None else join(out, lse, sinks.tensor)


def accumulate_gradient(sinks: Sinks | None, lse: Tensor, inner: Tensor) -> None:
    """Accumulate the gradient of sinks.

    Args:
        lse: log-sum-exp including the sinks.
        inner: inner products of the output and its gradient.
    """
    if sinks is not None:
        sinks.accumulate(sinks_gradient(sinks.tensor, lse, inner))


class SomeSinks:
    """Sinks of the heads that a rank of an axis has after `ulysses.to_heads`."""

    def __init__(self, sinks: Weight, axis: MeshAxis):
        width = len(sinks.tensor) // axis.size
        self.sinks, self.heads = sinks, slice(width * axis.rank, width * (axis.rank + 1))

    @property
    def tensor(self) -> Tensor:
        return self.sinks.tensor[self.heads]

    def accumulate(self, value: Tensor) -> None:
        whole = value.new_zeros(len(self.sinks.tensor))
        whole[self.heads] = value
        self.sinks.accumulate(whole)
