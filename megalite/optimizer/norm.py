"""The global gradient norm: squares of every global element once, over chunks, combined in fp64.

Chunks of at most 65,536 elements are cut at segment boundaries. Each dp rank takes its own shard (under every ZeRO stage), each
segment is taken on its owning tp rank and stage; one all-reduce over the world then adds each element exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megalite_kernels.grad_norm import squared_sum
from torch import Tensor

from megalite.mesh import Mesh
from megalite.parallel.collectives import all_reduce, message
from megalite.parallel.sharding.store import ParameterStore

CHUNK = 65_536


class GradientNorm:
    """Measures the gradient norm of a store, together with other numbers that every rank wants summed over the world."""

    def __init__(self, store: ParameterStore, mesh: Mesh):
        self.mesh = mesh
        self.device = store.buckets[0].weights.device
        self.chunks: list[Tensor] = []
        for bucket, rectangle, offset in store.owned_rectangles():
            if bucket.gradients is not None:
                flat = bucket.owned_grads[offset + rectangle.start - bucket.start : offset + rectangle.stop - bucket.start]
                self.chunks.extend(flat.split(CHUNK) if flat.is_cpu else [flat])  # on a GPU a launch costs more than accuracy gains

    def own(self, others: Sequence[float | Tensor]) -> Tensor:
        """This rank's part: its squares, then `others` (1-d fp64)."""
        squares = squared_sum(self.chunks) if self.chunks else 0.0  # a shard may be all padding
        return torch.stack([self._number(value) for value in (squares, *others)])

    def _number(self, value: float | Tensor) -> Tensor:
        if isinstance(value, Tensor):
            return value.to(self.device, torch.float64)
        return torch.full((), value, dtype=torch.float64, device=self.device)  # unlike a copy from the host, this waits for nothing

    def __call__(self, others: Sequence[float | Tensor]) -> tuple[Tensor, Tensor]:
        """The norm (0-d fp64) and the sums of `others` over the world (1-d fp64), in one collective, on the CPU: reading them is the one
        time in a step that the host waits for a GPU."""
        total = all_reduce(self.own(others), self.mesh.world).wait().cpu()
        return total[0].sqrt(), total[1:]


class NormChain:
    """The same sums, added rank by rank along the pipeline: up to the last rank, and the total back down.

    A rank waits only for those before it; those after it may still be computing. For each `start` call `total` once.
    """

    def __init__(self, norm: GradientNorm, mesh: Mesh):
        assert mesh.stage is not None
        self.norm, self.pp, self.stage, self.channels = norm, mesh.pp, mesh.stage, mesh.channels
        self.is_last = mesh.pp.rank == mesh.pp.size - 1
        self._total = torch.empty(0)
        self._arriving: Any = None
        self._sends: list[tuple[Any, Tensor]] = []

    def start(self, others: Sequence[float | Tensor]) -> None:
        """Add this rank's part to the chain. Collective over the ranks of a stage."""
        self.finish()
        sums = all_reduce(self.norm.own(others), self.stage).wait()
        if self.pp.rank > 0:
            before = torch.empty_like(sums)
            self._message(dist.irecv, before, -1, "totals_up").wait()
            sums = before + sums
        self._total = sums
        if not self.is_last:
            self._sends.append((self._message(dist.isend, sums, 1, "totals_up"), sums))
            self._total = torch.empty_like(sums)
            self._arriving = self._message(dist.irecv, self._total, 1, "totals_down")

    def total(self) -> tuple[Tensor, Tensor]:
        """The norm (0-d fp64) and the sums of the other numbers over the world (1-d fp64), on the CPU."""
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None
        if self.pp.rank > 0:
            self._sends.append((self._message(dist.isend, self._total, -1, "totals_down"), self._total))
        total = self._total.cpu()
        return total[0].sqrt(), total[1:]

    def finish(self) -> None:
        """Return once everything sent has arrived: what nobody holds any more would be lost on the way."""
        for work, _ in self._sends:
            work.wait()
        self._sends = []

    def _message(self, operation: Callable[..., Any], x: Tensor, step: int, channel: str) -> Any:
        mesh, peer = self.norm.mesh, self.pp.ranks[self.pp.rank + step]
        mesh.traffic[operation.__name__, "totals"] += 1
        return message(operation, x, peer, self.channels[channel], f"gradient norm, {channel}", mesh.activity)


def clip_divisor(norm: Tensor, limit: float) -> Tensor | None:
    """What gradients are divided by so that their norm does not exceed `limit`: at least 1, on the device of the norm.

    None where clipping is off. torch's convention: limit / (norm + 1e-6).
    """
    return ((norm + 1e-6) / limit).clamp(min=1.0).float() if limit > 0 else None
