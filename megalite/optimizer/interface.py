"""The interface of an optimizer: all that the trainer and the weight updaters use of it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from megalite.optimizer.state import OptimizerState


class Optimizer(Protocol):
    """Updates one rank's master weights from their gradients and from its state."""

    state: OptimizerState

    def step(self, step: int, lr: float, divisor: Tensor | None) -> None:
        """Update this rank's master weights, and its weights from them. `step` is 1-based; gradients are
        divided by `divisor`, a scalar. If that is NaN nothing changes: the step is skipped. All ranks of a
        stage call it together: some optimizers communicate.

        Gradients are not passed: an optimizer holds views of `GradientBucket.owned` from its construction.
        """
