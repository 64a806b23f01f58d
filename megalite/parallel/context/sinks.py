"""The sinks of the heads that a rank attends with, where they are some of those of its tp rank. No communication.

Every cp rank has the gradient of its own queries or heads, zero for other heads; the sum over cp is that of all weights.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from megalite.mesh import MeshAxis
from megalite.parallel.weight import Weight


class Sinks(Protocol):
    """One number for each head: a `Weight`, or a part of one."""

    @property
    def tensor(self) -> Tensor: ...

    def accumulate(self, value: Tensor) -> None: ...


class SomeSinks:
    """Those of the heads that a rank of an axis has after `ulysses.to_heads`."""

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
