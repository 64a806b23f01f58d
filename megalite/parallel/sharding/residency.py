"""Weights that are whole only while they are used (ZeRO-3; Rajbhandari et al. 2020).

A rank keeps its shard of each bucket. Before a unit of the model computes, its bucket is gathered over data parallelism; afterwards the
full buffer is freed. Which unit is used when follows from the schedule alone, so the next one is gathered while this one computes, and a
bucket that is needed again at once stays: at most two are whole at a time. `keep` frees nothing before the end of the step: one
gathering a step instead of one for each use, and all weights in memory.

    forward   enter: gather this unit, start gathering the next        leave: free
    backward  leave: the same                                          enter: free
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megalite.mesh import MeshAxis
from megalite.parallel.collectives import all_gather
from megalite.parallel.pipeline.schedule import Action, Kind

if TYPE_CHECKING:
    from megalite.parallel.sharding.store import BucketMemory


def unit_uses(actions: Sequence[Action], units: Mapping[int, Sequence[int]]) -> list[int]:
    """The units whose weights a rank's actions need, in order; `units`: stage → its units. An embedding's backward needs no weights."""
    uses: list[int] = []
    for action in actions:
        if action.kind is Kind.FORWARD:
            uses += units[action.stage]
        elif action.kind is Kind.BACKWARD:
            uses += [unit for unit in reversed(units[action.stage]) if unit > 0]
    return uses


class Residency:
    """Gathers and frees the full weights of one rank's buckets."""

    def __init__(self, by_unit: Mapping[int, Sequence[BucketMemory]], axis: MeshAxis, keep: bool):
        self.by_unit, self.axis, self.keep = by_unit, axis, keep
        self._uses: Sequence[int] = ()
        self._position = 0  # of the next use

    def expect(self, uses: Sequence[int]) -> None:
        """Say in which order units will be used from now on."""
        self._uses, self._position = uses, 0

    def acquire(self, unit: int) -> None:
        """Return once a unit's weights are there; start gathering those of the next."""
        if self._next() == unit:
            self._position += 1
        for memory in self.by_unit.get(unit, ()):
            self._start(memory)
            if memory.gathering is not None:
                memory.gathering.wait()
                memory.gathering = None
            memory.users += 1
        for memory in self._needed_next():
            self._start(memory)

    def release(self, unit: int) -> None:
        """Free a unit's weights, unless they are needed next."""
        for memory in self.by_unit.get(unit, ()):
            memory.users -= 1
            if memory.users == 0 and not self.keep and not any(memory is other for other in self._needed_next()):
                memory.free()

    def drop(self) -> None:
        """Free everything: the shards have changed."""
        for memories in self.by_unit.values():
            for memory in memories:
                if memory.gathering is not None:
                    memory.gathering.wait()
                    memory.gathering = None
                memory.free()

    def _next(self) -> int | None:
        return self._uses[self._position] if self._position < len(self._uses) else None

    def _needed_next(self) -> Sequence[BucketMemory]:
        unit = self._next()
        return () if unit is None else self.by_unit.get(unit, ())

    def _start(self, memory: BucketMemory) -> None:
        if not memory.resident:
            assert memory.shard is not None
            memory.weights.untyped_storage().resize_(memory.layout.size * memory.weights.itemsize)
            memory.gathering = all_gather(memory.shard, self.axis, memory.weights)


class Enter(torch.autograd.Function):
    """Before a unit. Forward: acquire its weights.  Backward: release them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residency: Residency, unit: int) -> Tensor:
        ctx.residency, ctx.unit = residency, unit
        residency.acquire(unit)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.residency.release(ctx.unit)
        return grads[0], None, None


class Leave(torch.autograd.Function):
    """After a unit. Forward: release its weights.  Backward: acquire them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residency: Residency, unit: int) -> Tensor:
        ctx.residency, ctx.unit = residency, unit
        residency.release(unit)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.residency.acquire(ctx.unit)
        return grads[0], None, None
