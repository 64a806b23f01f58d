"""Exponential moving average of the weights (`train.ema_decay`).

It is a kind of state that any optimizer can have.

    at the start              average ← weights
    after each applied step   average ← decay · average + (1 − decay) · weights

It averages this rank's master weights, and has their dtype, memory and sharding. A skipped step does not
change it, and undoing a step restores it with the optimizer's state. Frozen weights have no average: it would
equal them. Communicates only where the average is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megalite.optimizer.state import OptimizerState
from megalite.parallel.spec import EMA

PIECE = 1 << 24  # elements: a step that may skip itself needs memory for one piece


class WeightAverage:
    """Moving average of the trained weights.

    Args:
        state: has the kind `EMA` of every trainable segment.
    """

    def __init__(self, state: OptimizerState, decay: float):
        self.store, self.decay = state.store, decay
        self._spans = [(span.master, span.state[EMA]) for span in state.spans(EMA)]

    @torch.no_grad()
    def start(self) -> None:
        """Set the average to the present weights."""
        for master, average in self._spans:
            average.copy_(master)

    @torch.no_grad()
    def update(self, divisor: Tensor | None) -> None:
        """Update the average after a step of the optimizer with this divisor.

        The device decides whether the step was skipped: the host does not wait for it.
        """
        skip = None if divisor is None else divisor.to(self.store.state.device, non_blocking=True).isnan()
        for master, average in self._spans:
            for part, weights in zip(average.split(PIECE), master.split(PIECE), strict=True):
                if skip is None:
                    part.lerp_(weights, 1 - self.decay)
                else:
                    part.copy_(torch.where(skip, part, part.lerp(weights, 1 - self.decay)))
            for tensor in (master, average):
                self.store.state.release(tensor)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Compute with the averages inside the block, and with the same weights as before after it.

        No step may be pending. Collective: weights are gathered.
        """
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        """Swap master weights and averages, and publish the new weights."""
        self.store.gatherer.finish()  # gathers in flight still read the weights
        for master, average in self._spans:
            weights = master.clone()
            master.copy_(average)
            average.copy_(weights)
        self.store.publish()
