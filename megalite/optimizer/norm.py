"""The global gradient norm.

Each global element is squared once and summed in chunks, which are combined in fp64.

Each dp rank counts its own shard (under every ZeRO stage), and each segment counts on its owning tp rank and
stage, so that the sum over the world has each element exactly once. Neighbors in a bucket are summed as one
range: few operations, however many tensors a model has.

Communication: one all-reduce over the world (`AllReduceNorm`), or an all-reduce over the ranks of a stage and
one message each way between adjacent pipeline ranks (`ChainedNorm`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megalite_kernels.grad_norm import squared_sum
from torch import Tensor

from megalite.mesh.mesh import Mesh
from megalite.parallel.collectives import Pending, Work, all_reduce, message
from megalite.parallel.sharding.bucket_buffers import BucketBuffers
from megalite.parallel.sharding.store import ParameterStore


class NormReduction(Protocol):
    """Sums the squares of gradients over all ranks, and other numbers with them.

    Call `total` exactly once for each `start`.

    Attributes:
        chunks: the gradients that this rank counts: each global element on exactly one rank.
        knows_total: whether the total is on this rank when `start` returns, so that `total` waits for no
            other rank.
    """

    chunks: list[Tensor]
    knows_total: bool

    def start(self, others: Sequence[float | Tensor]) -> None:
        """Add this rank's squares and `others`."""

    def total(self) -> Tensor:
        """Return the norm and the sums of the other numbers over the world.

        The result is [1 + len(others)] fp64, on the device.
        """

    def finish(self) -> None:
        """Wait until all messages are delivered."""


def owned_ranges(store: ParameterStore) -> list[tuple[BucketBuffers, int, int]]:
    """Return the ranges [start, stop) of buckets whose trained elements this rank owns.

    Rectangles that touch, or have only padding between them, which is zero, are one range.
    """
    ranges: list[tuple[BucketBuffers, int, int]] = []
    for bucket, rectangle, offset in store.owned_rectangles():
        if bucket.gradients is None:
            continue
        start, stop = offset + rectangle.start, offset + rectangle.stop
        if ranges and ranges[-1][0] is bucket:
            _, first, before = ranges[-1]
            if before == start or (before, start) in bucket.layout.gaps:
                ranges[-1] = (bucket, first, stop)
                continue
        ranges.append((bucket, start, stop))
    return ranges


class LocalSquares:
    """The part of the norm that this rank computes, from the elements that it owns."""

    def __init__(self, store: ParameterStore):
        self.device = store.device
        self.chunks = [
            bucket.owned_grads[start - bucket.start : stop - bucket.start]
            for bucket, start, stop in owned_ranges(store)
        ]

    def sums(self, others: Sequence[float | Tensor]) -> Tensor:
        """Return the sum of squares, followed by `others`, as one fp64 vector.

        Each of `others` is a number or a tensor with several numbers.
        """
        squares = squared_sum(self.chunks) if self.chunks else 0.0  # a shard may be all padding
        return torch.cat([self._number(value).flatten() for value in (squares, *others)])

    def _number(self, value: float | Tensor) -> Tensor:
        if isinstance(value, Tensor):
            return value.to(self.device, torch.float64)
        # unlike a copy from the host, this does not synchronize
        return torch.full((), value, dtype=torch.float64, device=self.device)


class AllReduceNorm:
    """Sums with one all-reduce over the world."""

    knows_total = False

    def __init__(self, store: ParameterStore, mesh: Mesh):
        self.world, self._own = mesh.world, LocalSquares(store)
        self.chunks = self._own.chunks
        self._pending: Pending | None = None

    def start(self, others: Sequence[float | Tensor]) -> None:
        self._pending = all_reduce(self._own.sums(others), self.world)

    def total(self) -> Tensor:
        assert self._pending is not None
        total = self._pending.wait()  # [1 + len(others)]
        self._pending = None
        return torch.cat([total[:1].sqrt(), total[1:]])

    def finish(self) -> None:
        """Nothing is in flight after `total`."""


class ChainedNorm:
    """Sums along the pipeline: partial sums go up to the last pipeline rank, the total comes back down.

    In `start` a rank waits only for the ranks before it; those after it may still be computing. `total` waits
    for all.
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
        self.finish()  # the previous step's messages: their buffers may be freed afterwards
        # [1 + len(others)], over the ranks of this stage
        sums = all_reduce(self._own.sums(others), self.stage).wait()
        if self.pp.rank > 0:
            before = torch.empty_like(sums)
            self._message(dist.irecv, before, -1, "totals_up").wait()
            sums = before + sums
        self._total = sums
        if not self.knows_total:
            self._sends.append((self._message(dist.isend, sums, 1, "totals_up"), sums))
            self._total = torch.empty_like(sums)
            # posted now, awaited in `total`
            self._arriving = self._message(dist.irecv, self._total, 1, "totals_down")

    def total(self) -> Tensor:
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None
        if self.pp.rank > 0:
            self._sends.append((self._message(dist.isend, self._total, -1, "totals_down"), self._total))
        return torch.cat([self._total[:1].sqrt(), self._total[1:]])

    def finish(self) -> None:
        """Wait until all messages are delivered.

        Until then the sent tensors are held: a freed one would be lost.
        """
        for work, _ in self._sends:
            work.wait()
        self._sends = []

    def _message(self, operation: Callable[..., Any], x: Tensor, step: int, channel: str) -> Work:
        peer = self.pp.ranks[self.pp.rank + step]
        self.mesh.traffic[operation.__name__, "totals"] += 1
        return message(
            operation, x, peer, self.channels[channel], f"gradient norm, {channel}", self.mesh.activity
        )


def update_divisor(norm: Tensor, loss: Tensor, limit: float, highest: float) -> Tensor:
    """Return the divisor of gradients, [] fp32: the clipping divisor, or NaN to skip the update.

    The device decides, so that the host does not wait.

    Args:
        norm, loss: [] fp64 each; the update is skipped if one of them is not finite.
        highest: the update is skipped if the loss is larger.
    """
    divisor = clip_divisor(norm, limit)
    accepted = norm.isfinite() & loss.isfinite() & (loss <= highest)
    return torch.where(accepted, 1.0 if divisor is None else divisor, torch.nan).float()


def clip_divisor(norm: Tensor, limit: float) -> Tensor | None:
    """Return the divisor that limits the norm of gradients to `limit`, or None if clipping is off.

    It is [] fp32, at least 1, on the device of `norm`.

    As in torch, gradients are multiplied by limit / (norm + 1e-6).
    """
    return ((norm + 1e-6) / limit).clamp(min=1.0).float() if limit > 0 else None
