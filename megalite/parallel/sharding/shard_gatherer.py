"""Gathering of weights that are stored as shards (ZeRO-3).

A rank keeps its shard of each bucket, and full weights, or their fp8 codes (`sharding.weight_codes`), only
exist while they are used. The schedule decides when (`pipeline.gather_actions`): a gather or reshard
precedes, in the list, the computation during which it is executed. `gather` and `reshard` record it, and the
units of the model execute it when they begin and end:

    forward   start: wait for the unit's weights, start the gathers recorded for the unit
              end:   free the buckets recorded for the unit
    backward  end:   the same as the start in forward
              start: the same as the end in forward

Communication: all-gather over the shard axis, as often as the schedule gathers; for codes also an all-reduce
of maxima when weights have changed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from megalite.mesh.mesh import MeshAxis
from megalite.parallel.collectives import Pending, all_gather
from megalite.parallel.node import Node
from megalite.parallel.sharding.bucket_buffers import BucketBuffers
from megalite.parallel.sharding.transfers import TransferLog
from megalite.parallel.sharding.weight_gatherer import WeightGatherer

Gather = Callable[[Tensor, MeshAxis, Tensor], Pending]
"""Collective that fills the full weights: (shard [size/shard], axis, full weights [size])."""


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
        self._collective, self.has_boundaries = collective, True
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
        return Node.apply(x, None, self.start_of(unit))

    def post_forward(self, unit: int, x: Tensor) -> Tensor:
        if unit == 0:  # the backward of an embedding does not need weights, so they are not gathered again
            self.release(unit)
            return x
        return Node.apply(x, None, self.end_of(unit))

    def gather_updated(self, loaded: bool = False) -> None:
        """Free the full weights, which are outdated because the shards have changed.

        Buckets whose codes are gathered get those of the new weights.
        """
        self.updates, self.loads = self.updates + 1, self.loads + loaded
        self._free_all()
        coded = [each for each in self.buckets if each.layout.coded]
        if coded:
            from megalite.parallel.sharding.weight_codes import update_codes  # not needed without fp8

            update_codes(each for each in coded if loaded or each.layout.trainable)

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
        shard = bucket.shard if bucket.codes is None else bucket.codes.kept
        pending = self._collective(shard, bucket.domain.shard, bucket.full)
        bucket.gathering = self.log.gathering(f"gather {self.buckets.index(bucket)}", pending)
