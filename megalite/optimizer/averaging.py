"""An exponential moving average of the weights (`train.ema_decay`), next to any optimizer.

    average ← decay · average + (1 − decay) · weights        after each applied step; at the start: the weights

The average is kept of this rank's master weights, with their dtype, in their memory and sharded as they are: a skipped step does not move
it, and an undone step takes it back with the optimizer's state. No communication.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from megalite.optimizer.interface import Optimizer
from megalite.optimizer.table import EMA
from megalite.parallel.sharding.store import ParameterStore
from megalite.parallel.spec import Rectangle, Segment

PIECE = 1 << 24  # elements: a step that may skip itself needs memory for one piece


class Averaged:
    """An optimizer, and the average of the weights that it updates. Frozen weights have none: they would be their own average."""

    def __init__(self, optimizer: Optimizer, store: ParameterStore, decay: float):
        self.optimizer, self.store, self.decay = optimizer, store, decay
        self._averages = {
            bucket: store.state.zeros(bucket.master.numel(), bucket.master.dtype) for bucket in store.buckets if bucket.layout.trainable
        }

    def state_kinds(self, segment: Segment) -> tuple[str, ...]:
        """Those of the optimizer, and the average of a trainable segment."""
        return (*self.optimizer.state_kinds(segment), *((EMA,) if segment.trainable else ()))

    @torch.no_grad()
    def start(self) -> None:
        """Let the average begin at the present weights."""
        for bucket, average in self._averages.items():
            average.copy_(bucket.master)

    @torch.no_grad()
    def step(self, step: int, lr: float, divisor: Tensor | None) -> None:
        """As the interface says. Whether the step is skipped is decided where the weights are: the host does not wait for it."""
        self.optimizer.step(step, lr, divisor)
        skip = None if divisor is None else divisor.to(self.store.state.device, non_blocking=True).isnan()
        for bucket, average in self._averages.items():
            for part, weights in zip(average.split(PIECE), bucket.master.split(PIECE), strict=True):
                if skip is None:
                    part.lerp_(weights, 1 - self.decay)
                else:
                    part.copy_(torch.where(skip, part, part.lerp(weights, 1 - self.decay)))

    def changing(self) -> list[Tensor]:
        """All tensors that a step changes: the optimizer's, and the averages."""
        return [*self.optimizer.changing(), *self._averages.values()]

    def copy_state(self) -> list[Tensor]:
        """Copies of all tensors that a step changes."""
        return [*self.optimizer.copy_state(), *(average.clone() for average in self._averages.values())]

    def restore_state(self, copies: Sequence[Tensor]) -> None:
        """Undo all steps since `copy_state`, as the interface says."""
        own = len(copies) - len(self._averages)
        self.optimizer.restore_state(copies[:own])
        for average, copy in zip(self._averages.values(), copies[own:], strict=True):
            average.copy_(copy)

    def to_save(self, kinds: Sequence[str] | None = None) -> list[Rectangle]:
        """This rank's part of a checkpoint: over all ranks, each element of weights, state and averages exactly once."""
        own = [
            bucket.rectangle(EMA, self._averages[bucket], flat, offset)
            for bucket, flat, offset in self.store.owned_rectangles()
            if bucket in self._averages and (kinds is None or EMA in kinds)
        ]
        return [*self.optimizer.to_save(kinds), *own]

    def to_load(self) -> list[Rectangle]:
        """Everything on this rank that a checkpoint must fill, tied copies and replicas included."""
        return [*self.optimizer.to_load(), *self.averages_to_load()]

    def averages_to_load(self) -> list[Rectangle]:
        """The averages among them, which a checkpoint of a run without `train.ema_decay` does not have."""
        return [
            bucket.rectangle(EMA, average, flat, offset)
            for bucket, average in self._averages.items()
            for flat, offset in self.store.rectangles_in(bucket, bucket.start, bucket.stop)
        ]

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside, the model computes with the averages; afterwards again with its weights, bit for bit. No step may be pending. Collective:
        weights are gathered."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        """Exchange master weights and averages, and publish the new ones."""
        self.store.gatherer.finish()  # gathers in flight still read the weights
        for bucket, average in self._averages.items():
            kept = bucket.master.clone()
            bucket.master.copy_(average)
            average.copy_(kept)
        self.store.publish()
