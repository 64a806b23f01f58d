"""Gradients of one bucket on one rank: the buffers in which they accumulate, and which weights are complete.

    ZeRO-0, 1   one full buffer for the whole step; after the last microbatch one all-reduce (ZeRO-0) or
                reduce-scatter (ZeRO-1)
    ZeRO-2, 3   a full buffer only while the gradients of a microbatch arrive; then a reduce-scatter, whose
                result is added to the shard

Keeping only shards saves memory and increases traffic: with m microbatches a bucket is reduced m times. A
bucket is reduced when every weight in it has all contributions of a microbatch. A weight may already have
contributions of later microbatches (with a split backward the gradient of a norm comes with B, that of a
matrix with W): they are reduced with the rest, because the result is a sum.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megalite.mesh.mesh import Domain
from megalite.parallel.sharding.buckets import BucketLayout
from megalite.parallel.weight import Weight

if TYPE_CHECKING:
    from megalite.parallel.sharding.powersgd import Compression
    from megalite.parallel.sharding.reducer import GradientReducer


@dataclass(eq=False)
class GradientBucket:
    """Gradients of one bucket.

    Attributes:
        start, stop: range of the bucket for which this rank keeps optimizer state.
        owned: [stop - start], the gradients of that range; valid after `GradientReducer.finish`.
        full: [size], the buffer in which gradients accumulate. With `shards_only`, None between a reduction
            and the next contribution.
        shards_only: whether only `owned` is kept after a microbatch (ZeRO-2 and 3).
        separate_embedding_grad: [size], second accumulator of a tied tensor, see
            Weight.separate_embedding_grad.
        compression: PowerSGD's reduction of `full`; None if `full` is reduced uncompressed.
        missing: for each reduction of the step, the number of incomplete weights. A single counter would be
            wrong: with a split backward the contributions of several microbatches arrive interleaved.
    """

    layout: BucketLayout
    domain: Domain
    start: int
    stop: int
    owned: Tensor
    full: Tensor | None
    shards_only: bool
    reducer: GradientReducer
    weights: list[Weight] = field(default_factory=list)
    separate_embedding_grad: Tensor | None = None
    compression: Compression | None = None
    missing: list[int] = field(default_factory=list)
    uninitialized: bool = True  # with shards_only: whether nothing has been added to `owned` in this step

    @staticmethod
    def allocate(
        layout: BucketLayout,
        domain: Domain,
        zero: int,
        dtype: torch.dtype,
        device: torch.device,
        reducer: GradientReducer,
    ) -> GradientBucket:
        shard = domain.shard
        start, stop = layout.part(shard.rank, shard.size)
        if zero >= 2 and shard.size > 1:
            owned = torch.zeros(stop - start, dtype=dtype, device=device)
            return GradientBucket(layout, domain, start, stop, owned, None, True, reducer)
        full = torch.zeros(layout.size, dtype=dtype, device=device)
        # `owned` is a view of `full`: the reduction writes this rank's part in place.
        return GradientBucket(layout, domain, start, stop, full[start:stop], full, False, reducer)

    def add(self, weight: Weight) -> None:
        """Add the weight of the next slot."""
        weight.bucket = self
        self.weights.append(weight)
        if self.full is not None:
            weight.grad = self._view(self.full, len(self.weights) - 1)

    def separate_embedding(self) -> None:
        """Add a second buffer for a tensor that embedding and head share.

        It is reduced like the first one, and added at the end of the step.
        """
        assert self.full is not None
        self.separate_embedding_grad = torch.zeros_like(self.full)
        for index, weight in enumerate(self.weights):
            weight.separate_embedding_grad(self._view(self.separate_embedding_grad, index))

    def begin_step(self, microbatches: int, loss_scale: float) -> None:
        # a shard's full buffer is freed after each microbatch
        reductions = microbatches if self.shards_only else 1
        self.missing, self.uninitialized = [len(self.weights)] * reductions, True
        if self.compression is not None:
            self.compression.loss_scale = loss_scale
        for weight in self.weights:
            weight.begin_step(microbatches, reductions)

    def open(self) -> None:
        """Allocate the buffer in which gradients accumulate, and set `grad` of every weight."""
        # limits memory, because each reduction in flight has a full buffer
        self.reducer.make_room(in_flight=1)
        # Not zeroed: a weight's first contribution overwrites its part, and `release_full` zeroes what has
        # none. Padding must stay finite.
        self.full = torch.empty(self.layout.size, dtype=self.owned.dtype, device=self.owned.device)
        for start, stop in self.layout.gaps:
            self.full[start:stop].zero_()
        for index, weight in enumerate(self.weights):
            weight.grad = self._view(self.full, index)

    def complete(self, weight: Weight, reduction: int) -> None:
        """Count a weight that has all contributions of a reduction; the last weight starts the reduction."""
        self.missing[reduction] -= 1
        if not self.missing[reduction]:
            self.reducer.start(self)

    def release_full(self) -> Tensor:
        """Return the full buffer ([size]) and release it; the next contribution allocates a new one."""
        assert self.full is not None
        buffer, self.full = self.full, None
        for weight in self.weights:
            weight.release_grad()
        return buffer

    def add_to_shard(self, part: Tensor) -> None:
        """Add the reduced part of a microbatch ([stop - start]); the first one of a step overwrites."""
        if self.uninitialized:
            self.owned.copy_(part)
        else:
            self.owned.add_(part)
        self.uninitialized = False

    def _view(self, buffer: Tensor, index: int) -> Tensor:
        slot = self.layout.slots[index]
        return buffer[slot.start : slot.stop].view(slot.shape)
