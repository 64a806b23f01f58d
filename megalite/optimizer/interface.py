"""The interface of an optimizer over shards: all that the trainer, step finalizers, checkpoints and memory reports use of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from megalite.parallel.spec import Rectangle, Segment


class Optimizer(Protocol):
    """The optimizer state of one rank, next to the store's master weights."""

    def state_kinds(self, segment: Segment) -> tuple[str, ...]:
        """Names of the optimizer state of a segment, each of the segment's shape; the master weight is not among them."""

    def step(self, step: int, lr: float, divisor: Tensor | None) -> None:
        """Update this rank's master weights, and its weights from them. `step` is 1-based; gradients are divided by `divisor`, a scalar.
        If that is NaN nothing changes: the step is skipped. All ranks of a stage call it together: some optimizers communicate.

        Gradients are not passed: an optimizer holds views of `GradientBucket.owned` from its construction.
        """

    def changing(self) -> list[Tensor]:
        """All tensors that a step changes: master weights and state."""

    def copy_state(self) -> list[Tensor]:
        """Copies of all tensors that a step changes."""

    def restore_state(self, copies: Sequence[Tensor]) -> None:
        """Undo all steps since `copy_state`. The weights follow with the next `step`, or with `ParameterStore.publish`."""

    def to_save(self, kinds: Sequence[str] | None = None) -> list[Rectangle]:
        """This rank's part of a checkpoint: over all ranks, each element of weights and state exactly once."""

    def to_load(self) -> list[Rectangle]:
        """Everything on this rank that a checkpoint must fill, tied copies and replicas included."""
