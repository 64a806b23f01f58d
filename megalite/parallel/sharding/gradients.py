"""The gradients of one rank's buckets: where they accumulate, and when and how they are reduced over data parallelism.

    whole    a full buffer for the whole step; after the last microbatch one all-reduce (ZeRO-0) or reduce-scatter (ZeRO-1)
    shards   a full buffer only while a microbatch's gradients arrive; then a reduce-scatter whose part is added to the shard (ZeRO-2)

Shards save memory and cost volume: with m microbatches they are reduced m times. A bucket is reduced when every tensor in it has all of a
microbatch's contributions. A tensor may be ahead of that (under a split backward a norm's gradient comes with B, a matrix's with W): what
it has added by then is reduced with the rest, since everything is a sum.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megalite.mesh import MeshAxis
from megalite.parallel.collectives import Pending, all_reduce, reduce_scatter
from megalite.parallel.sharding.buckets import Bucket
from megalite.parallel.weight import Weight

IN_FLIGHT = 2  # full buffers that may wait for their reduction beside the one that is being filled


@dataclass(eq=False)
class BucketGradients:
    """One bucket's gradients on one rank.

    Attributes:
        owned: [stop - start], the gradients whose optimizer state this rank keeps; valid after `finish`.
        full: [size], what accumulates; None while there is nothing, where only shards are kept.
        apart: [size], a tied tensor's second accumulator, see Weight.keep_apart.
    """

    layout: Bucket
    start: int
    stop: int
    owned: Tensor
    full: Tensor | None
    shards_only: bool
    weights: list[Weight] = field(default_factory=list)
    apart: Tensor | None = None
    complete: list[int] = field(default_factory=list)  # for each reduction of the step, how many tensors are ready
    reductions: list[Pending] = field(default_factory=list)
    fresh: bool = True  # nothing has been added to `owned` in this step

    @staticmethod
    def allocate(layout: Bucket, shard: MeshAxis, zero: int, dtype: torch.dtype, device: torch.device | str) -> BucketGradients:
        start, stop = layout.part(shard.rank, shard.size)
        if zero >= 2 and shard.size > 1:
            return BucketGradients(layout, start, stop, torch.zeros(stop - start, dtype=dtype, device=device), None, True)
        full = torch.zeros(layout.size, dtype=dtype, device=device)
        return BucketGradients(layout, start, stop, full[start:stop], full, False)

    def view(self, buffer: Tensor, index: int) -> Tensor:
        slot = self.layout.slots[index]
        return buffer[slot.start : slot.stop].view(slot.shape)

    def keep_apart(self) -> None:
        """Give a tensor that embedding and head share a second buffer, reduced like the first and added at the end."""
        assert self.full is not None
        self.apart = torch.zeros_like(self.full)
        for index, weight in enumerate(self.weights):
            weight.keep_apart(self.view(self.apart, index))


class GradientReducer:
    """Starts and awaits the reductions of all buckets: over the ranks that share shards, then over their replicas."""

    def __init__(self, buckets: Sequence[BucketGradients], shard: MeshAxis, replicate: MeshAxis):
        self.buckets, self.shard, self.replicate = buckets, shard, replicate
        self._in_flight: deque[tuple[BucketGradients, Pending]] = deque()

    def begin_step(self, microbatches: int) -> None:
        for bucket in self.buckets:
            rounds = microbatches if bucket.shards_only else 1
            bucket.complete, bucket.fresh = [0] * rounds, True
            for weight in bucket.weights:
                weight.begin_step(microbatches, rounds)

    def open(self, bucket: BucketGradients) -> None:
        """Give a bucket a buffer to accumulate in."""
        while len(self._in_flight) >= IN_FLIGHT:
            self._finish_oldest()
        bucket.full = torch.zeros(bucket.layout.size, dtype=bucket.owned.dtype, device=bucket.owned.device)
        for index, weight in enumerate(bucket.weights):
            weight.grad = bucket.view(bucket.full, index)

    def completed(self, bucket: BucketGradients, reduction: int) -> None:
        """One more tensor has what the `reduction`-th reduction of this step waits for."""
        bucket.complete[reduction] += 1
        if bucket.complete[reduction] == len(bucket.weights) and self.shard.size * self.replicate.size > 1:
            self._start(bucket)

    def _start(self, bucket: BucketGradients) -> None:
        if bucket.shards_only:
            if bucket.full is None:  # no tensor of the bucket was used; the other ranks may have used it
                self.open(bucket)
            assert bucket.full is not None
            self._in_flight.append((bucket, reduce_scatter(bucket.full, self.shard)))
            bucket.full = None
            for weight in bucket.weights:
                weight.forget()
            return
        for buffer in (bucket.full, bucket.apart):
            if buffer is not None:
                own, sharded = buffer[bucket.start : bucket.stop], self.shard.size > 1
                started = reduce_scatter(buffer, self.shard, own) if sharded else all_reduce(buffer, self.replicate, buffer)
                bucket.reductions.append(started)

    def _finish_oldest(self) -> None:
        bucket, pending = self._in_flight.popleft()
        part = pending.wait()
        if bucket.fresh:
            bucket.owned.copy_(part)
        else:
            bucket.owned.add_(part)
        bucket.fresh = False

    def finish(self) -> None:
        """Wait for every reduction. Raises RuntimeError where a tensor lacks contributions."""
        for bucket in self.buckets:
            for weight in bucket.weights:
                weight.finish_step()
        while self._in_flight:
            self._finish_oldest()
        for bucket in self.buckets:
            while bucket.reductions:
                bucket.reductions.pop(0).wait()
            if bucket.apart is not None:
                bucket.owned.add_(bucket.apart[bucket.start : bucket.stop])
        if self.shard.size > 1:
            for pending in [all_reduce(bucket.owned, self.replicate, bucket.owned) for bucket in self.buckets]:
                pending.wait()
