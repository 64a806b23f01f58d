"""The global gradient norm: squares of every global element once, over chunks, combined in fp64.

Chunks of at most 65,536 elements are cut at segment boundaries. Each dp rank takes its own shard (under every ZeRO stage), each
segment is taken on its owning tp rank and stage; one all-reduce over the world then adds each element exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megalite_kernels.grad_norm import squared_sum
from torch import Tensor

from megalite.mesh import Mesh
from megalite.parallel.collectives import Pending, Work, all_reduce, message
from megalite.parallel.sharding.store import ParameterStore

CHUNK = 65_536


class NormReduction(Protocol):
    """Sums every rank's squares of gradients, and other numbers with them. For each `start` call `total` once.

    Attributes:
        chunks: this rank's gradients, each global element on one rank.
        knows_total: whether `total` waits for no other rank once `start` has returned.
    """

    chunks: list[Tensor]
    knows_total: bool

    def start(self, others: Sequence[float | Tensor]) -> None:
        """Add this rank's part."""

    def total(self) -> tuple[Tensor, Tensor]:
        """The norm (0-d fp64) and the sums of the other numbers over the world (1-d fp64), on the CPU.

        Reading them is the one time in a step that the host waits for a GPU.
        """

    def finish(self) -> None:
        """Wait until everything sent has arrived."""


class LocalSquares:
    """This rank's part of the norm: the gradients of the global elements that it owns."""

    def __init__(self, store: ParameterStore):
        self.device = store.device
        self.chunks: list[Tensor] = []
        for bucket, rectangle, offset in store.owned_rectangles():
            if bucket.gradients is not None:
                flat = bucket.owned_grads[offset + rectangle.start - bucket.start : offset + rectangle.stop - bucket.start]
                self.chunks.extend(flat.split(CHUNK) if flat.is_cpu else [flat])  # on a GPU a launch costs more than accuracy gains

    def followed_by(self, others: Sequence[float | Tensor]) -> Tensor:
        """The sum of squares, then `others` (1-d fp64)."""
        squares = squared_sum(self.chunks) if self.chunks else 0.0  # a shard may be all padding
        return torch.stack([self._number(value) for value in (squares, *others)])

    def _number(self, value: float | Tensor) -> Tensor:
        if isinstance(value, Tensor):
            return value.to(self.device, torch.float64)
        return torch.full((), value, dtype=torch.float64, device=self.device)  # unlike a copy from the host, this waits for nothing


class AllReduceNorm:
    """Sums by one all-reduce over the world."""

    knows_total = False

    def __init__(self, store: ParameterStore, mesh: Mesh):
        self.world, self._own = mesh.world, LocalSquares(store)
        self.chunks = self._own.chunks
        self._pending: Pending | None = None

    def start(self, others: Sequence[float | Tensor]) -> None:
        self._pending = all_reduce(self._own.followed_by(others), self.world)

    def total(self) -> tuple[Tensor, Tensor]:
        assert self._pending is not None
        total = self._pending.wait().cpu()
        self._pending = None
        return total[0].sqrt(), total[1:]

    def finish(self) -> None:
        """`total` leaves nothing in flight."""


class ChainedNorm:
    """Sums rank by rank along the pipeline: up to the last rank, and the total back down.

    A rank waits only for those before it; those after it may still be computing.
    """

    def __init__(self, store: ParameterStore, mesh: Mesh):
        assert mesh.stage is not None
        self.mesh, self.pp, self.stage, self.channels = mesh, mesh.pp, mesh.stage, mesh.channels
        self._own = LocalSquares(store)
        self.chunks = self._own.chunks
        self.knows_total = mesh.pp.rank == mesh.pp.size - 1
        self._total = torch.empty(0)
        self._arriving: Work | None = None
        self._sends: list[tuple[Work, Tensor]] = []

    def start(self, others: Sequence[float | Tensor]) -> None:
        self.finish()
        sums = all_reduce(self._own.followed_by(others), self.stage).wait()
        if self.pp.rank > 0:
            before = torch.empty_like(sums)
            self._message(dist.irecv, before, -1, "totals_up").wait()
            sums = before + sums
        self._total = sums
        if not self.knows_total:
            self._sends.append((self._message(dist.isend, sums, 1, "totals_up"), sums))
            self._total = torch.empty_like(sums)
            self._arriving = self._message(dist.irecv, self._total, 1, "totals_down")

    def total(self) -> tuple[Tensor, Tensor]:
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None
        if self.pp.rank > 0:
            self._sends.append((self._message(dist.isend, self._total, -1, "totals_down"), self._total))
        total = self._total.cpu()
        return total[0].sqrt(), total[1:]

    def finish(self) -> None:
        """Wait until everything sent has arrived: what nobody holds any more would be lost on the way."""
        for work, _ in self._sends:
            work.wait()
        self._sends = []

    def _message(self, operation: Callable[..., Any], x: Tensor, step: int, channel: str) -> Work:
        peer = self.pp.ranks[self.pp.rank + step]
        self.mesh.traffic[operation.__name__, "totals"] += 1
        return message(operation, x, peer, self.channels[channel], f"gradient norm, {channel}", self.mesh.activity)


def clip_divisor(norm: Tensor, limit: float) -> Tensor | None:
    """What gradients are divided by so that their norm does not exceed `limit`: at least 1, on the device of the norm.

    None where clipping is off. torch's convention: limit / (norm + 1e-6).
    """
    return ((norm + 1e-6) / limit).clamp(min=1.0).float() if limit > 0 else None
