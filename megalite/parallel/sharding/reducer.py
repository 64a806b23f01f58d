"""When and how the gradients of a rank's buckets are reduced.

Over data parallelism: over the ranks that share shards, then over their replicas. A bucket's reduction starts when its last weight is
complete, in the middle of the backward, and runs next to it. After the backward, `finish` waits for all, and sums what tensor-parallel
ranks, key-value replicas and the two copies of a tied embedding hold parts of.

Gradients arrive already divided by the global token count, so every reduction is a plain sum.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megalite.mesh import Mesh, MeshAxis
from megalite.parallel.collectives import all_gather, all_reduce, all_reduce_together, reduce_scatter, reduces_in_place
from megalite.parallel.sharding.gradient_bucket import GradientBucket
from megalite.parallel.sharding.powersgd import PowerSGD
from megalite.parallel.sharding.transfers import TransferLog
from megalite.parallel.spec import Segment

Rounds = Iterator[None]
"""The collectives of a reduction: each `next` waits for one and starts the one that follows."""


class Reduction:
    """One reduction in flight. Records when its collectives ran, while the log has a clock."""

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
        """Wait for all that remains."""
        while not self.done:
            self.advance()

    def _next_round(self) -> bool:
        """Whether the reduction has ended."""
        return next(self._rounds, self) is self


class GradientReducer:
    """Starts the reductions of all buckets and waits for them.

    Args:
        log: records every reduction.
        comm_dtype: gradients are cast to this before they are sent; None: they are sent as they accumulate.
        powersgd: compresses the reductions of ZeRO-0 and ZeRO-1.
    """

    def __init__(self, mesh: Mesh, log: TransferLog, comm_dtype: torch.dtype | None = None, powersgd: PowerSGD | None = None):
        self.mesh = mesh
        self.log, self.comm_dtype, self.powersgd = log, comm_dtype, powersgd
        self.buckets: list[GradientBucket] = []
        self._at = mesh.coordinates
        self._takes_memory = comm_dtype is not None or not reduces_in_place(mesh.shard) or not reduces_in_place(mesh.replicate)
        self._in_flight: deque[Reduction] = deque()
        self._partial: list[Tensor] = []  # owned parts that are summed over tp after the backward
        self._replicated: list[Tensor] = []  # the same over ranks that hold the same key-value head

    def add(self, bucket: GradientBucket) -> None:
        """Take in a bucket with all of its weights."""
        self.buckets.append(bucket)
        if self.powersgd is not None:
            bucket.compression = self.powersgd.compress(bucket.layout, bucket.owned)
        self._partial += self._owned_parts(bucket, lambda segment: segment.grad_partial_axis == "tp")
        self._replicated += self._owned_parts(bucket, lambda segment: segment.replicas > 1)

    def begin_step(self, microbatches: int, loss_scale: float = 1.0) -> None:
        """Expect a step's gradients, each multiplied by `loss_scale`."""
        for bucket in self.buckets:
            bucket.begin_step(microbatches, loss_scale)

    def start(self, bucket: GradientBucket) -> None:
        """Start the reduction of a bucket whose weights are all complete."""
        if bucket.domain.owners == 1:
            return
        if bucket.shards_only:
            if bucket.full is None:  # no weight of the bucket was used; other ranks may have used it
                bucket.open()
            self._start(bucket, self._into_shard(bucket))
            return
        assert bucket.full is not None
        self._start(bucket, self._in_place(bucket, bucket.full) if bucket.compression is None else bucket.compression.reduce(bucket.full))
        if bucket.separate_embedding_grad is not None:
            self._start(bucket, self._in_place(bucket, bucket.separate_embedding_grad))

    def make_room(self, in_flight: int) -> None:
        """Wait until at most `in_flight` reductions are in flight: each holds buffers."""
        while len(self._in_flight) > in_flight:
            self._in_flight.popleft().finish()

    def finish(self) -> None:
        """Wait for every reduction, then sum over the ranks of a stage and over tied copies.

        Raises:
            RuntimeError: a weight lacks contributions.
        """
        for bucket in self.buckets:
            for weight in bucket.weights:
                weight.finish_step()
        _finish_all(self._in_flight)
        for bucket in self.buckets:
            if bucket.separate_embedding_grad is not None:
                bucket.owned.add_(bucket.separate_embedding_grad[bucket.start : bucket.stop])
        self._sum_over_replicas()
        _sum_together(self._partial, self.mesh.tp)
        _sum_together(self._replicated, self.mesh.kv_replica)
        if self.mesh.tied_pair is not None:
            for bucket in self.buckets:
                if bucket.layout.slots[0].spec.tied:
                    all_reduce(bucket.owned, self.mesh.tied_pair, bucket.owned).wait()

    def confirm(self, applied: bool) -> None:
        """Whether the last reduced gradients became an update: PowerSGD keeps the errors of those that did."""
        if self.powersgd is not None:
            self.powersgd.confirm(applied)

    def _start(self, bucket: GradientBucket, rounds: Rounds) -> None:
        if self._takes_memory and bucket.compression is None:
            self.make_room(in_flight=0)
        reduction = Reduction(f"reduce {self.buckets.index(bucket)}", rounds, self.log)
        reduction.start()
        self._in_flight.append(reduction)

    def _into_shard(self, bucket: GradientBucket) -> Rounds:
        """Reduce a microbatch's gradients, free their buffer, and add this rank's part to its shard."""
        pending = reduce_scatter(bucket.release_full(), bucket.domain.shard, comm_dtype=self.comm_dtype)
        yield
        bucket.add_to_shard(pending.wait())

    def _in_place(self, bucket: GradientBucket, buffer: Tensor) -> Rounds:
        """Reduce a whole buffer in place; where shards are shared, only this rank's part is valid afterwards."""
        if bucket.domain.shard.size == 1:
            yield from self._over_replicas(buffer, bucket.domain.replicate)
            return
        pending = reduce_scatter(buffer, bucket.domain.shard, buffer[bucket.start : bucket.stop], self.comm_dtype)
        yield
        pending.wait()

    def _over_replicas(self, buffer: Tensor, axis: MeshAxis) -> Rounds:
        """Sum a buffer over the replicas, in place, the same bits on each.

        A sum made in fp32 differs from what the other ranks receive of it, so it is rounded to `comm_dtype` as well. Between two ranks that
        is not needed: exchanging all contributions costs as much as exchanging halves of contributions and halves of sums.
        """
        comm_dtype = self.comm_dtype
        if axis.size == 1:
            return
        if comm_dtype is None:
            summed = all_reduce(buffer, axis, buffer)
            yield
            summed.wait()
        elif axis.size == 2:
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
        """Sum the shards of every bucket over their replicas, all at once."""
        reductions = [
            Reduction(f"replicate {number}", self._over_replicas(bucket.owned, bucket.domain.replicate), self.log)
            for number, bucket in enumerate(self.buckets)
            if bucket.domain.shard.size > 1
        ]
        for reduction in reductions:
            reduction.start()
        _finish_all(deque(reductions))

    def _owned_parts(self, bucket: GradientBucket, wanted: Callable[[Segment], bool]) -> Iterator[Tensor]:
        """Views of this rank's owned gradients of the wanted segments."""
        for slot in bucket.layout.slots:
            start = slot.start
            for segment in slot.spec.segments:
                stop = start + segment.local(self._at).numel
                low, high = max(start, bucket.start), min(stop, bucket.stop)
                if wanted(segment) and low < high:
                    yield bucket.owned[low - bucket.start : high - bucket.start]
                start = stop


def _finish_all(reductions: deque[Reduction]) -> None:
    """Bring reductions to their end, taking turns: the rounds of many then run at the same time."""
    while reductions:
        reduction = reductions.popleft()
        if not reduction.done:
            reduction.advance()
            reductions.append(reduction)


def _sum_together(parts: list[Tensor], axis: MeshAxis) -> None:
    """Sum many small tensors over an axis in one collective, in place."""
    if not parts or axis.size == 1:
        return
    for part, value in zip(parts, all_reduce_together(parts, axis)(), strict=True):
        part.copy_(value)
