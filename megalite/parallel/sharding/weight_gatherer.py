"""Gathering of weights, which makes the full weights of a unit available before its forward and backward.

`WeightGatherer` is for ZeRO 0 to 2: full weights stay in memory. The parts that each rank has updated are
gathered after the step, and the first forward of the unit waits for them. ZeRO-3 keeps shards
(`shard_gatherer`).

Communication: all-gather over the shard axis, once per step in ZeRO-1 and 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from megalite.parallel.collectives import all_gather
from megalite.parallel.node import Differentiable, Saved
from megalite.parallel.sharding.bucket_buffers import BucketBuffers
from megalite.parallel.sharding.transfers import TransferLog


class WeightGatherer:
    """Gatherer for full weights that stay in memory.

    Buckets that are updated in parts are gathered after each step.

    Args:
        buckets: the buckets of the rank, by number.
        by_unit: the buckets that each unit needs.
        sharded_update: whether each rank updates only its part of a bucket, so that the parts must be
            gathered (ZeRO-1 and 2).
        log: records every gather.

    Attributes:
        updates: the number of changes of the weights so far.
        loads: the number of those that may have changed frozen weights, too.
    """

    def __init__(
        self,
        buckets: Sequence[BucketBuffers],
        by_unit: Mapping[int, Sequence[BucketBuffers]],
        sharded_update: bool,
        log: TransferLog,
    ):
        self.buckets, self.by_unit, self.sharded_update, self.log = buckets, by_unit, sharded_update, log
        # whether something is done where units start and end: weights that nobody gathers are there
        self.has_boundaries = sharded_update
        self.updates = self.loads = 0

    def pre_forward(self, unit: int, x: Tensor) -> Tensor:
        """Make the weights of the unit available for its forward on x and the backward of it. Return x."""
        self.wait_for(unit)
        return x

    def post_forward(self, unit: int, x: Tensor) -> Tensor:
        """Process the unit's output x. Return x."""
        return x

    def acquire(self, unit: int) -> None:
        """Wait for the weights of a unit, at the start of its forward or backward."""
        self.wait_for(unit)

    def release(self, unit: int) -> None:
        """Note that the forward or backward of a unit has ended."""

    def between_boundaries(self, unit: int, operations: Sequence[Differentiable]) -> list[Differentiable]:
        """Return the operations of a unit as parts of a node, between its start and its end."""
        if not self.has_boundaries:
            return [*operations]
        return [self.start_of(unit), *operations, self.end_of(unit)]

    def start_of(self, unit: int) -> UnitBoundary:
        return UnitBoundary(partial(self.acquire, unit), partial(self.release, unit))

    def end_of(self, unit: int) -> UnitBoundary:
        return UnitBoundary(partial(self.release, unit), partial(self.acquire, unit))

    def gather_updated(self, loaded: bool = False) -> None:
        """Start gathering the updated weights.

        The forwards of the next step wait for them unit by unit, so that the gathers overlap with it.

        Args:
            loaded: whether frozen weights may have changed, too.
        """
        self.updates, self.loads = self.updates + 1, self.loads + loaded
        for number, bucket in enumerate(self.buckets):
            if self.sharded_update and bucket.layout.trainable:
                # only pending if no forward has run since the last update, as in a rollback
                bucket.await_weights()
                # [size/shard] -> [size], in place
                gathering = all_gather(bucket.owned_weights, bucket.domain.shard, bucket.weights)
                bucket.gathering = self.log.gathering(f"gather {number}", gathering)

    def wait_for(self, unit: int) -> None:
        """Wait until the unit's weights are up to date. Call before each use; free if nothing is pending."""
        for bucket in self.by_unit.get(unit, ()):
            bucket.await_weights()

    def finish(self) -> None:
        """Wait for all gathers in flight after an update."""
        for unit in self.by_unit:
            self.wait_for(unit)

    def begin_run(self, planned: bool) -> None:
        """Prepare for executing a schedule.

        Args:
            planned: its list contains gathers and reshards.
        """

    def gather(self, bucket: int, unit: int | None) -> None:
        """Record that a bucket is gathered when the next computation reaches a unit.

        If the unit is None, gather it now.
        """
        raise RuntimeError(f"the schedule gathers bucket {bucket}, but its weights are not sharded")

    def reshard(self, bucket: int, unit: int | None) -> None:
        """Record that a bucket is freed when the next computation leaves a unit."""
        raise RuntimeError(f"the schedule frees bucket {bucket}, but its weights are not sharded")


class UnitBoundary:
    """Start or end of a unit of the model, as an operation of a node (`parallel.node`).

    Its forward calls `forward_action`, its backward `backward_action`. The backward passes the end of a unit
    first and its start last, so that the actions of the two are swapped.
    """

    def __init__(self, forward_action: Callable[[], None], backward_action: Callable[[], None]):
        self.forward_action, self.backward_action = forward_action, backward_action

    def compute(self, x: Tensor, saved: Saved, *context: Any) -> Tensor:
        self.forward_action()
        return x

    def gradient(self, grad: Tensor, saved: Saved, *context: Any) -> Tensor:
        self.backward_action()
        return grad
