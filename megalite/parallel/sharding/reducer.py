"""Reduction of the gradients in a rank's buckets.

Forward: no communication. Backward: a bucket whose last weight is complete (determined by
`GradientBucket.complete`) is reduced over the data-parallel ranks, which overlaps with the rest of the
backward: by an all-reduce if nothing is sharded, otherwise by a reduce-scatter over the shard axis. After the
backward, `finish` waits for all reductions, sums shards over their replicas (HSDP), and all-reduces partial
sums on several ranks: gradients that are partial over tp, key-value heads that several tp ranks hold, and the
two copies of a tied embedding.

The loss is divided by the global token count before the backward, so every reduction is a plain sum.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megalite.mesh.mesh import Mesh, MeshAxis
from megalite.parallel.collectives import (
    all_gather,
    all_reduce,
    all_reduce_together,
    reduce_scatter,
    reduces_in_place,
)
from megalite.parallel.sharding.gradient_bucket import GradientBucket
from megalite.parallel.sharding.transfers import TransferLog
from megalite.parallel.spec import Segment

if TYPE_CHECKING:
    from megalite.parallel.sharding.powersgd import PowerSGD

Rounds = Iterator[None]
"""Collectives of a reduction: each `next` waits for the one in flight and starts the next one."""


class Reduction:
    """A reduction in flight. The times of its collectives are recorded if the log has a clock."""

    def __init__(self, name: str, rounds: Rounds, log: TransferLog):
        self._name, self._rounds, self._log, self._clock = name, rounds, log, log.clock
        self._started: Any = None
        self.done = False

    def start(self) -> None:
        """Start the first collective."""
        if self._clock is not None:
            self._started = self._clock.mark()
        self.done = self._next_round()

    def advance(self) -> None:
        """Wait for the collective in flight and start the next one."""
        if self._clock is None:
            self.done = self._next_round()
            return
        awaited = self._clock.mark()
        self.done = self._next_round()
        end = self._clock.mark()
        self._log.record(self._name, self._started, awaited, end)
        self._started = end

    def finish(self) -> None:
        """Wait for the remaining collectives."""
        while not self.done:
            self.advance()

    def _next_round(self) -> bool:
        """Run to the next `yield`. Return whether the reduction has finished."""
        try:
            next(self._rounds)
        except StopIteration:
            return True
        return False


class GradientReducer:
    """Reducer of all buckets: `start` when a bucket is complete, `finish` after the backward.

    Args:
        log: records every reduction.
        comm_dtype: gradients are cast to this before they are sent; None: they are sent in the accumulate
            dtype.
        powersgd: compresses the reductions of ZeRO-0 and ZeRO-1.
    """

    def __init__(
        self,
        mesh: Mesh,
        log: TransferLog,
        comm_dtype: torch.dtype | None = None,
        powersgd: PowerSGD | None = None,
    ):
        self.mesh = mesh
        self.log, self.comm_dtype, self.powersgd = log, comm_dtype, powersgd
        self.buckets: list[GradientBucket] = []
        self._at = mesh.coordinates
        # A reduction that allocates buffers must leave little room for others. On NCCL in another dtype two
        # of them: the second one starts while the device still adds the first one's parts. On gloo one, whose
        # buffers are as large as all ranks' parts.
        in_place = all(map(reduces_in_place, (mesh.shard, mesh.replicate, *mesh.expert_split)))
        self._most_in_flight = 1 if not in_place else 2 if comm_dtype is not None else None
        self._in_flight: deque[Reduction] = deque()
        # views of `owned` that are partial over tp, summed after the backward
        self._partial: list[Tensor] = []
        # views of `owned` of key-value heads that several tp ranks hold, by the number of these, over which
        # they are summed
        self._replicated: dict[int, list[Tensor]] = {number: [] for number in mesh.replicas}

    def add(self, bucket: GradientBucket) -> None:
        """Add a bucket that has all of its weights."""
        self.buckets.append(bucket)
        if self.powersgd is not None:
            bucket.compression = self.powersgd.compress(bucket.layout, bucket.owned)
        self._partial += self._owned_parts(bucket, lambda segment: segment.grad_partial_axis == "tp")
        for number, replicated in self._replicated.items():
            replicated += self._owned_parts(bucket, partial(_has_replicas, number))

    def begin_step(self, microbatches: int, loss_scale: float = 1.0) -> None:
        """Prepare for the gradients of a step, each multiplied by `loss_scale`."""
        for bucket in self.buckets:
            bucket.begin_step(microbatches, loss_scale)

    def start(self, bucket: GradientBucket) -> None:
        """Start the reduction of a bucket whose weights are all complete."""
        if bucket.domain.owners == 1:
            return  # only one rank has the bucket: nothing to reduce over data parallelism
        if bucket.shards_only:
            # no weight of the bucket was used here; other ranks may have used it and take part in the
            # collective
            if bucket.full is None:
                bucket.open()
            self._start(bucket, self._into_shard(bucket))
            return
        assert bucket.full is not None
        self._start(
            bucket,
            self._in_place(bucket, bucket.full)
            if bucket.compression is None
            else bucket.compression.reduce(bucket.full),
        )
        if bucket.separate_embedding_grad is not None:
            self._start(bucket, self._in_place(bucket, bucket.separate_embedding_grad))

    def make_room(self, in_flight: int) -> None:
        """Wait until at most `in_flight` reductions are in flight, oldest first.

        Each of them has its own buffers.
        """
        while len(self._in_flight) > in_flight:
            self._in_flight.popleft().finish()

    def finish(self) -> None:
        """Wait for all reductions, then sum what several ranks hold.

        The sums are over replicas of shards, partial tp ranks, key-value replicas and tied copies, in this
        order. `owned` is valid afterwards.

        Raises:
            RuntimeError: contributions of a weight are missing.
        """
        for bucket in self.buckets:
            for weight in bucket.weights:
                # starts the reductions of buckets with weights that the step did not use
                weight.finish_step()
        _finish_all(self._in_flight)
        for bucket in self.buckets:
            if bucket.separate_embedding_grad is not None:
                bucket.owned.add_(bucket.separate_embedding_grad[bucket.start : bucket.stop])
        # These sums need only the owned ranges, 1/shard of the volume: the peers on the other axes own the
        # same ranges.
        self._sum_over_replicas()
        _sum_together(self._partial, self.mesh.tp)
        for number, replicated in self._replicated.items():
            _sum_together(replicated, self.mesh.replicas[number])
        if self.mesh.tied_pair is not None:
            for bucket in self.buckets:
                if bucket.layout.tied:
                    all_reduce(bucket.owned, self.mesh.tied_pair, bucket.owned).wait()

    def confirm(self, applied: bool) -> None:
        """Set whether the last reduced gradients were applied.

        PowerSGD discards the errors of those that were not.
        """
        if self.powersgd is not None:
            self.powersgd.confirm(applied)

    def _start(self, bucket: GradientBucket, rounds: Rounds) -> None:
        if self._most_in_flight is not None and bucket.compression is None:
            self.make_room(in_flight=self._most_in_flight - 1)
        reduction = Reduction(f"reduce {self.buckets.index(bucket)}", rounds, self.log)
        reduction.start()
        self._in_flight.append(reduction)

    def _into_shard(self, bucket: GradientBucket) -> Rounds:
        """Reduce the gradients of a microbatch, free their buffer, and add this rank's part to its shard."""
        # [size]
        pending = reduce_scatter(bucket.release_full(), bucket.domain.shard, comm_dtype=self.comm_dtype)
        yield
        bucket.add_to_shard(pending.wait())  # [size/shard]

    def _in_place(self, bucket: GradientBucket, buffer: Tensor) -> Rounds:
        """Reduce a full buffer ([size]) in place.

        With a shard axis only this rank's part is valid afterwards (ZeRO-1).
        """
        if bucket.domain.shard.size == 1:
            yield from self._over_replicas(buffer, bucket.domain.replicate)
            return
        pending = reduce_scatter(
            buffer, bucket.domain.shard, buffer[bucket.start : bucket.stop], self.comm_dtype
        )
        yield
        pending.wait()

    def _over_replicas(self, buffer: Tensor, axis: MeshAxis) -> Rounds:
        """Sum a buffer over the replicas, in place, with bitwise equal results.

        With a comm_dtype, the rank that computes a part of the sum in fp32 must also use it as rounded to
        comm_dtype, because the other ranks receive it in this form. With two ranks the sum need not be
        rounded: exchanging all contributions costs as much as exchanging halves of the contributions and
        halves of the sums.
        """
        comm_dtype = self.comm_dtype
        if axis.size == 1:
            return
        if comm_dtype is None:
            summed = all_reduce(buffer, axis, buffer)
            yield
            summed.wait()
        elif axis.size == 2:
            # [2 · size], both ranks' contributions, this rank's rounded, too
            both = all_gather(buffer.to(comm_dtype), axis)
            yield
            torch.add(*both.wait().to(buffer.dtype).chunk(2), out=buffer)
        else:
            part = reduce_scatter(buffer, axis, comm_dtype=comm_dtype)
            yield
            whole = all_gather(part.wait().to(comm_dtype), axis)
            yield
            buffer.copy_(whole.wait())

    def _sum_over_replicas(self) -> None:
        """Sum the shards of all buckets over their replicas.

        The collectives of all buckets are in flight at once.
        """
        reductions = [
            Reduction(
                f"replicate {number}", self._over_replicas(bucket.owned, bucket.domain.replicate), self.log
            )
            for number, bucket in enumerate(self.buckets)
            if bucket.domain.shard.size > 1
        ]
        for reduction in reductions:
            reduction.start()
        _finish_all(deque(reductions))

    def _owned_parts(self, bucket: GradientBucket, wanted: Callable[[Segment], bool]) -> Iterator[Tensor]:
        """Yield flat views of this rank's owned gradients of the wanted segments.

        A shard may contain a part of a segment, or none.
        """
        for slot in bucket.layout.slots:
            start = slot.start
            for segment in slot.spec.segments:
                stop = start + segment.local(self._at).numel
                low, high = max(start, bucket.start), min(stop, bucket.stop)
                if wanted(segment) and low < high:
                    yield bucket.owned[low - bucket.start : high - bucket.start]
                start = stop


def _finish_all(reductions: deque[Reduction]) -> None:
    """Finish reductions, advancing each by one collective at a time, so that their collectives overlap."""
    while reductions:
        reduction = reductions.popleft()
        if not reduction.done:
            reduction.advance()
            reductions.append(reduction)


def _has_replicas(number: int, segment: Segment) -> bool:
    return segment.replicas == number


def _sum_together(parts: list[Tensor], axis: MeshAxis) -> None:
    """Sum many small tensors over an axis, in place.

    A single collective is used, so that its latency occurs only once.
    """
    if not parts or axis.size == 1:
        return
    for part, value in zip(parts, all_reduce_together(parts, axis)(), strict=True):
        part.copy_(value)
