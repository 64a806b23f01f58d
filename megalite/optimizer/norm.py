"""The global gradient norm: squares of every global element once, over chunks, combined in fp64.

Chunks of at most 65,536 elements are cut at segment boundaries. Each dp rank takes its own shard (under every ZeRO stage), each
segment is taken on its owning tp rank and stage; one all-reduce over the world then adds each element exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megalite_kernels.grad_norm import squared_sum
from torch import Tensor

from megalite.mesh import Mesh
from megalite.parallel.collectives import all_reduce
from megalite.parallel.sharding.store import ParameterStore

CHUNK = 65_536


class GradientNorm:
    """Measures the gradient norm of a store, together with other numbers that every rank wants summed over the world."""

    def __init__(self, store: ParameterStore, mesh: Mesh):
        self.mesh = mesh
        self.device = store.buckets[0].weights.device
        self.chunks: list[Tensor] = []
        for memory, rectangle, offset in store.counted_once():
            if memory.grads is not None:
                flat = memory.grads[offset + rectangle.start : offset + rectangle.stop]
                self.chunks.extend(flat.split(CHUNK) if flat.is_cpu else [flat])  # on a GPU a launch costs more than accuracy gains

    def __call__(self, others: Sequence[float | Tensor]) -> tuple[Tensor, Tensor]:
        """The norm (0-d fp64) and the sums of `others` over the world (1-d fp64), in one collective."""
        squares = squared_sum(self.chunks) if self.chunks else 0.0  # a shard may be all padding
        numbers = [torch.as_tensor(value, dtype=torch.float64, device=self.device) for value in (squares, *others)]
        total = all_reduce(torch.stack(numbers), self.mesh.world).wait()
        return total[0].sqrt(), total[1:]


def clip_divisor(norm: Tensor, limit: float) -> Tensor | None:
    """What gradients are divided by so that their norm does not exceed `limit`: at least 1, on the device of the norm.

    None where clipping is off. torch's convention: limit / (norm + 1e-6).
    """
    return ((norm + 1e-6) / limit).clamp(min=1.0).float() if limit > 0 else None
