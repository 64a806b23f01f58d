"""Weights that are whole only while they are used (ZeRO-3). A rank keeps its shard of each bucket and does what the schedule's list says.

Gathers and reshards stand in the list in front of the computation during which they happen (`pipeline.gathering`): `plan` takes note of
them, and the units of the model, as they are entered and left, carry them out.

    forward   enter: await this unit's weights, begin the gathers planned for here        leave: free what is planned for here
    backward  leave: the same                                                             enter: the same
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megalite.mesh import MeshAxis
from megalite.parallel.collectives import Pending, all_gather
from megalite.parallel.pipeline.schedule import Action, Kind
from megalite.parallel.sharding.transfers import TransferLog

if TYPE_CHECKING:
    from megalite.parallel.sharding.store import BucketMemory

Gather = Callable[[Tensor, MeshAxis, Tensor], Pending]
"""(shard, axis, whole weights): the collective that fills the latter."""


class Residency:
    """Gathers and frees the full weights of one rank's buckets.

    Args:
        buckets: the rank's, by number; those that are not kept as shards are left alone.
        by_unit: the buckets that a unit needs.
        axis: the ranks that share each bucket.
        log: hears of every gather.
        gather: how shards become whole weights.
    """

    def __init__(
        self,
        buckets: Sequence[BucketMemory],
        by_unit: Mapping[int, Sequence[BucketMemory]],
        axis: MeshAxis,
        log: TransferLog,
        gather: Gather = all_gather,
    ):
        self.buckets, self.axis, self.log, self.gather = buckets, axis, log, gather
        self.by_unit = {unit: [memory for memory in memories if memory.shard is not None] for unit, memories in by_unit.items()}
        self._planned = False
        self._moves: defaultdict[tuple[Kind, int], list[BucketMemory]] = defaultdict(list)

    def begin(self, planned: bool) -> None:
        """Forget what was planned, and free what was kept. Without a plan, a unit's weights are whole from when it is entered to when it
        is left."""
        self.drop()
        self._planned = planned
        self._moves.clear()

    def plan(self, action: Action) -> None:
        """Take note of a gather or reshard; one that is tied to no unit happens now."""
        assert action.bucket is not None
        memory = self.buckets[action.bucket]
        if action.unit is None:
            self._gather(memory)
        else:
            self._moves[action.kind, action.unit].append(memory)

    def enter(self, unit: int, x: Tensor) -> Tensor:
        """A unit begins to compute on x; its backward ends here. Returns x."""
        return Boundary.apply(x, partial(self.acquire, unit), partial(self.release, unit))

    def leave(self, unit: int, x: Tensor) -> Tensor:
        """A unit has computed x; its backward begins here. Returns x."""
        if unit == 0:  # an embedding's backward needs no weights
            self.release(unit)
            return x
        return Boundary.apply(x, partial(self.release, unit), partial(self.acquire, unit))

    def acquire(self, unit: int) -> None:
        """Return once a unit's weights are there; begin the gathers that were planned for now."""
        for memory in self.by_unit.get(unit, ()):
            if not self._planned:
                self._gather(memory)
            assert memory.resident, f"the schedule does not gather the weights of unit {unit} before they are used"
            memory.await_weights()
        for memory in self._moves.pop((Kind.GATHER, unit), ()):
            self._gather(memory)

    def release(self, unit: int) -> None:
        """Free what was planned to be freed when this unit ends."""
        for memory in self._moves.pop((Kind.RESHARD, unit), ()) if self._planned else self.by_unit.get(unit, ()):
            memory.free()

    def drop(self) -> None:
        """Free everything: the shards have changed."""
        for memory in self.buckets:
            if memory.shard is not None:
                memory.await_weights()
                memory.free()

    def _gather(self, memory: BucketMemory) -> None:
        assert memory.shard is not None and not memory.resident
        memory.weights.untyped_storage().resize_(memory.layout.size * memory.weights.itemsize)
        name = f"gather {self.buckets.index(memory)}"
        memory.gathering = self.log.gathering(name, self.gather(memory.shard, self.axis, memory.weights))


class Boundary(torch.autograd.Function):
    """One end of a unit. Forward: do `there`.  Backward: do `back`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[], None], back: Callable[[], None]) -> Tensor:
        ctx.back = back
        there()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.back()
        return grads[0], None, None
