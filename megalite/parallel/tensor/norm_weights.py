"""What norms need of a weight, and what stands for one that a norm does not have, or that is freed early.

No communication.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from megalite.parallel.weight import Weight


class NormWeight(Protocol):
    """Interface of a norm's weight or bias: a `Weight`, or a class of this module."""

    @property
    def tensor(self) -> Tensor | None: ...

    def accumulate(self, value: Tensor) -> None: ...


NormWeights = Mapping[str, NormWeight]
"""Stored name → weight or bias."""


class NoWeight:
    """Stands for the weight of a norm that has none: it only divides, and nothing is accumulated."""

    tensor: Tensor | None = None

    def accumulate(self, value: Tensor) -> None:
        """Do nothing: the norm has no gradient of a weight."""


NO_WEIGHT = NoWeight()


class CopiedWeight:
    """A weight of which `copy` keeps a copy for the backward, before which the weight itself is freed."""

    def __init__(self, weight: Weight):
        self.weight = weight
        self.tensor: Tensor | None = None

    def copy(self) -> None:
        # a leaf that requires a gradient, like the weight: see `parallel.node.Node`
        self.tensor = self.weight.tensor.detach().clone().requires_grad_(self.weight.trainable)

    def accumulate(self, value: Tensor) -> None:
        self.weight.accumulate(value)
