"""The gradients of one rank's buckets: where they accumulate, and when and how they are reduced over data parallelism.

    whole    a full buffer for the whole step; after the last microbatch one all-reduce (ZeRO-0) or reduce-scatter (ZeRO-1)
    shards   a full buffer only while a microbatch's gradients arrive; then a reduce-scatter whose part is added to the shard (ZeRO-2)

A reduction is a generator: made ready when its bucket is complete, it starts a first collective; each `next` awaits one and starts the one
that follows. So those of many rounds run side by side, and beside the backward.

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
from megalite.parallel.collectives import all_gather, all_reduce, reduce_scatter, reduces_in_place
from megalite.parallel.sharding.buckets import Bucket
from megalite.parallel.sharding.powersgd import Compression
from megalite.parallel.sharding.transfers import Reduction, TransferLog
from megalite.parallel.weight import Weight


@dataclass(eq=False)
class BucketGradients:
    """One bucket's gradients on one rank.

    Attributes:
        owned: [stop - start], the gradients whose optimizer state this rank keeps; valid after `finish`.
        full: [size], what accumulates; None while there is nothing, where only shards are kept.
        apart: [size], a tied tensor's second accumulator, see Weight.keep_apart.
        compression: how `full` is reduced by PowerSGD, where it is.
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
    compression: Compression | None = None
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
    """Starts and awaits the reductions of all buckets: over the ranks that share shards, then over their replicas.

    Args:
        log: hears of every reduction.
        travel: what gradients are rounded to on their way; None: as they accumulate.
    """

    def __init__(
        self, buckets: Sequence[BucketGradients], shard: MeshAxis, replicate: MeshAxis, log: TransferLog, travel: torch.dtype | None = None
    ):
        self.buckets, self.shard, self.replicate, self.log, self.travel = buckets, shard, replicate, log, travel
        self._takes_memory = travel is not None or not reduces_in_place(shard) or not reduces_in_place(replicate)
        self._in_flight: deque[Reduction] = deque()

    def begin_step(self, microbatches: int, loss_scale: float) -> None:
        for bucket in self.buckets:
            rounds = microbatches if bucket.shards_only else 1
            bucket.complete, bucket.fresh = [0] * rounds, True
            if bucket.compression is not None:
                bucket.compression.loss_scale = loss_scale
            for weight in bucket.weights:
                weight.begin_step(microbatches, rounds)

    def open(self, bucket: BucketGradients) -> None:
        """Give a bucket a buffer to accumulate in."""
        self._make_room(waiting=1)
        bucket.full = torch.zeros(bucket.layout.size, dtype=bucket.owned.dtype, device=bucket.owned.device)
        for index, weight in enumerate(bucket.weights):
            weight.grad = bucket.view(bucket.full, index)

    def completed(self, bucket: BucketGradients, reduction: int) -> None:
        """One more tensor has what the `reduction`-th reduction of this step waits for."""
        bucket.complete[reduction] += 1
        if bucket.complete[reduction] == len(bucket.weights) and self.shard.size * self.replicate.size > 1:
            self._reduce(bucket)

    def _reduce(self, bucket: BucketGradients) -> None:
        if bucket.shards_only:
            if bucket.full is None:  # no tensor of the bucket was used; the other ranks may have used it
                self.open(bucket)
            self._start(bucket, self._add_part(bucket))
            return
        assert bucket.full is not None
        self._start(bucket, self._whole(bucket, bucket.full) if bucket.compression is None else bucket.compression.reduce(bucket.full))
        if bucket.apart is not None:
            self._start(bucket, self._whole(bucket, bucket.apart))

    def _start(self, bucket: BucketGradients, reduction: Reduction) -> None:
        if self._takes_memory and bucket.compression is None:
            self._make_room(waiting=0)
        reduction = self.log.reduction(f"reduce {self.buckets.index(bucket)}", reduction)
        next(reduction)
        self._in_flight.append(reduction)

    def _make_room(self, waiting: int) -> None:
        """Wait until no more than `waiting` reductions are in flight, those of the buckets that were complete first."""
        while len(self._in_flight) > waiting:
            for _ in self._in_flight.popleft():
                pass

    def _add_part(self, bucket: BucketGradients) -> Reduction:
        """Reduce a microbatch's gradients, give their buffer back, and add this rank's part to its shard."""
        assert bucket.full is not None
        pending = reduce_scatter(bucket.full, self.shard, travel=self.travel)
        bucket.full = None
        for weight in bucket.weights:
            weight.forget()
        yield
        part = pending.wait()
        if bucket.fresh:
            bucket.owned.copy_(part)
        else:
            bucket.owned.add_(part)
        bucket.fresh = False

    def _whole(self, bucket: BucketGradients, buffer: Tensor) -> Reduction:
        """Reduce a whole buffer in place; where shards are shared, only its own part is valid afterwards."""
        if self.shard.size == 1:
            yield from self._everywhere(buffer)
            return
        pending = reduce_scatter(buffer, self.shard, buffer[bucket.start : bucket.stop], self.travel)
        yield
        pending.wait()

    def _everywhere(self, buffer: Tensor) -> Reduction:
        """Sum a buffer over the replicas, in place, the same bits on each.

        A sum that was made in fp32 would differ from what the others get of it, so it too is rounded to what travels. Between two ranks
        that is not needed: to swap all contributions costs as much as to swap halves of contributions and sums.
        """
        axis, travel = self.replicate, self.travel
        if axis.size == 1:
            return
        if travel is None:
            summed = all_reduce(buffer, axis, buffer)
            yield
            summed.wait()
        elif axis.size == 2:
            both = all_gather(buffer.to(travel), axis)
            yield
            torch.add(*both.wait().to(buffer.dtype).chunk(2), out=buffer)
        else:
            part = reduce_scatter(buffer, axis, travel=travel)
            yield
            whole = all_gather(part.wait().to(travel), axis)
            yield
            buffer.copy_(whole.wait())

    def finish(self) -> None:
        """Wait for every reduction. Raises RuntimeError where a tensor lacks contributions."""
        for bucket in self.buckets:
            for weight in bucket.weights:
                weight.finish_step()
        _run(self._in_flight)
        for bucket in self.buckets:
            if bucket.apart is not None:
                bucket.owned.add_(bucket.apart[bucket.start : bucket.stop])
        if self.shard.size > 1:
            replicas = (self.log.reduction(f"replicate {i}", self._everywhere(bucket.owned)) for i, bucket in enumerate(self.buckets))
            _run(deque(replicas))


def _run(reductions: deque[Reduction]) -> None:
    """Bring reductions to their end, side by side."""
    while reductions:
        reduction = reductions.popleft()
        if next(reduction, "done") is None:
            reductions.append(reduction)
