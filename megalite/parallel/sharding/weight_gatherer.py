"""Gathering of weights, which makes the full weights of a unit available before its forward and backward.

`WeightGatherer` is for ZeRO 0 to 2: full weights stay in memory. The parts that each rank has updated are
gathered after the step, and the first forward of the unit waits for them. `ShardGatherer` is for ZeRO-3: a
rank keeps its shard of each bucket, and full weights only exist while they are used. The schedule decides
when (`pipeline.gather_actions`): a gather or reshard precedes, in the list, the computation during which it
is executed. `gather` and `reshard` record it, and the units of the model execute it when they begin and end:

    forward   pre_forward:  wait for the unit's weights, start the gathers recorded for the unit
              post_forward: free the buckets recorded for the unit
    backward  post_forward: the same as pre_forward in forward
              pre_forward:  the same as post_forward in forward

Communication: all-gather over the shard axis, once per step in ZeRO-1 and 2, as often as the schedule gathers
in ZeRO-3.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megalite.mesh.mesh import MeshAxis
from megalite.parallel.collectives import Pending, all_gather
from megalite.parallel.node import Saved
from megalite.parallel.sharding.bucket_buffers import BucketBuffers
from megalite.parallel.sharding.transfers import TransferLog

Gather = Callable[[Tensor, MeshAxis, Tensor], Pending]
"""Collective that fills the full weights: (shard [size/shard], axis, full weights [size])."""


class WeightGatherer:
    """Gatherer for full weights that stay in memory.

    Buckets that are updated in parts are gathered after each step.

    Args:
        buckets: the buckets of the rank, by number.
        by_unit: the buckets that each unit needs.
        sharded_update: whether each rank updates only its part of a bucket, so that the parts must be
            gathered (ZeRO-1 and 2).
        log: records every gather.
    """

    def __init__(
        self,
        buckets: Sequence[BucketBuffers],
        by_unit: Mapping[int, Sequence[BucketBuffers]],
        sharded_update: bool,
        log: TransferLog,
    ):
        self.buckets, self.by_unit, self.sharded_update, self.log = buckets, by_unit, sharded_update, log

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

    def gather_updated(self) -> None:
        """Start gathering the updated weights.

        The forwards of the next step wait for them unit by unit, so that the gathers overlap with it.
        """
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
        """Prepare for executing a schedule. `planned`: its list contains gathers and reshards."""

    def gather(self, bucket: int, unit: int | None) -> None:
        """Record that a bucket is gathered when the next computation reaches a unit.

        If the unit is None, gather it now.
        """
        raise RuntimeError(f"the schedule gathers bucket {bucket}, but its weights are not sharded")

    def reshard(self, bucket: int, unit: int | None) -> None:
        """Record that a bucket is freed when the next computation leaves a unit."""
        raise RuntimeError(f"the schedule frees bucket {bucket}, but its weights are not sharded")


class ShardGatherer(WeightGatherer):
    """Gatherer for buckets that are stored as shards (ZeRO-3; Rajbhandari et al. 2020).

    It gathers and frees their full weights.

    Args:
        collective: the collective that gathers shards into full weights.
    """

    def __init__(
        self,
        buckets: Sequence[BucketBuffers],
        by_unit: Mapping[int, Sequence[BucketBuffers]],
        log: TransferLog,
        collective: Gather = all_gather,
    ):
        super().__init__(
            buckets,
            {unit: [each for each in own if each.shard is not None] for unit, own in by_unit.items()},
            False,
            log,
        )
        self._collective = collective
        self._planned = False
        self._gathers: defaultdict[int, list[BucketBuffers]] = defaultdict(list)  # by unit
        self._reshards: defaultdict[int, list[BucketBuffers]] = defaultdict(list)

    def begin_run(self, planned: bool) -> None:
        """Free what the last run kept.

        Without planned gathers, the weights of a unit are gathered when it begins and freed when it ends.
        """
        self._free_all()
        self._planned = planned
        self._gathers.clear()
        self._reshards.clear()

    def gather(self, bucket: int, unit: int | None) -> None:
        if unit is None:
            self._start(self.buckets[bucket])
        else:
            self._gathers[unit].append(self.buckets[bucket])

    def reshard(self, bucket: int, unit: int | None) -> None:
        assert unit is not None, "a bucket can only be freed at the end of a unit"
        self._reshards[unit].append(self.buckets[bucket])

    def pre_forward(self, unit: int, x: Tensor) -> Tensor:
        return _UnitBoundary.apply(x, partial(self.acquire, unit), partial(self.release, unit))

    def post_forward(self, unit: int, x: Tensor) -> Tensor:
        if unit == 0:  # the backward of an embedding does not need weights, so they are not gathered again
            self.release(unit)
            return x
        return _UnitBoundary.apply(x, partial(self.release, unit), partial(self.acquire, unit))

    def gather_updated(self) -> None:
        """Free the full weights, which are outdated because the shards have changed."""
        self._free_all()

    def wait_for(self, unit: int) -> None:
        """Do nothing, because `pre_forward` waits for the weights."""

    def acquire(self, unit: int) -> None:
        """Wait for the weights of a unit, then start the gathers recorded for it.

        They prefetch the next unit while this one computes.
        """
        for bucket in self.by_unit.get(unit, ()):
            if not self._planned:
                self._start(bucket)
            assert bucket.resident, (
                f"the schedule does not gather the weights of unit {unit} before they are used"
            )
            bucket.await_weights()
        for bucket in self._gathers.pop(unit, ()):
            self._start(bucket)

    def release(self, unit: int) -> None:
        """Free the buckets whose reshard is recorded for this unit."""
        for bucket in self._reshards.pop(unit, ()) if self._planned else self.by_unit.get(unit, ()):
            bucket.free()

    def _free_all(self) -> None:
        for bucket in (each for each in self.buckets if each.shard is not None):
            bucket.await_weights()  # a collective in flight writes into this memory
            bucket.free()

    def _start(self, bucket: BucketBuffers) -> None:
        assert bucket.shard is not None and not bucket.resident
        bucket.allocate()
        pending = self._collective(bucket.shard, bucket.domain.shard, bucket.weights)
        bucket.gathering = self.log.gathering(f"gather {self.buckets.index(bucket)}", pending)


class UnitStart:
    """Start of a unit, as an operation of a node that computes several units (`parallel.node`)."""

    def __init__(self, gatherer: WeightGatherer, unit: int):
        self.gatherer, self.unit = gatherer, unit

    def compute(self, x: Tensor, saved: Saved, state: Any) -> Tensor:
        self.gatherer.acquire(self.unit)
        return x

    def gradient(self, grad: Tensor, saved: Saved, state: Any) -> Tensor:
        self.gatherer.release(self.unit)
        return grad


class UnitEnd:
    """End of a unit, the opposite of `UnitStart`."""

    def __init__(self, gatherer: WeightGatherer, unit: int):
        self.gatherer, self.unit = gatherer, unit

    def compute(self, x: Tensor, saved: Saved, state: Any) -> Tensor:
        self.gatherer.release(self.unit)
        return x

    def gradient(self, grad: Tensor, saved: Saved, state: Any) -> Tensor:
        self.gatherer.acquire(self.unit)
        return grad


class _UnitBoundary(torch.autograd.Function):
    """Start or end of a unit of the model.

    Forward: calls `forward_action`. Backward: calls `backward_action`. The backward passes the end of a unit
    first and its start last, so that the two actions are swapped.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, forward_action: Callable[[], None], backward_action: Callable[[], None]
    ) -> Tensor:
        ctx.backward_action = backward_action
        forward_action()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.backward_action()
        return grads[0], None, None
