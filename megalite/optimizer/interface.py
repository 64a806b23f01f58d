"""What an optimizer over shards implements. The trainer, the end of a step, checkpoints and memory reports know no more of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from megalite.parallel.spec import Rectangle, Segment


class Optimizer(Protocol):
    """The optimizer state of one rank, next to the store's master weights."""

    def state_kinds(self, segment: Segment) -> tuple[str, ...]:
        """Names of what is kept of a segment, in its shape, besides the master weight."""

    def step(self, step: int, lr: float, divisor: Tensor | None) -> None:
        """Update this rank's master weights, and its weights from them. `step` is 1-based; gradients are divided by `divisor` first."""

    def changing(self) -> list[Tensor]:
        """All that a step changes: master weights and state."""

    def copy_state(self) -> list[Tensor]:
        """A copy of all that a step changes."""

    def restore_state(self, copies: Sequence[Tensor]) -> None:
        """Undo the steps since `copy_state`; `ParameterStore.publish` then makes the master weights the weights."""

    def to_save(self, kinds: Sequence[str] | None = None) -> list[Rectangle]:
        """This rank's share of a checkpoint: over all ranks each element of weights and state exactly once."""

    def to_load(self) -> list[Rectangle]:
        """Everything that this rank keeps and that a checkpoint must fill, copies and replicas included."""
