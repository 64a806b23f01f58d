"""A gradient norm in one call."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megalite.mesh.mesh import Mesh
from megalite.optimizer.norm import AllReduceNorm
from megalite.parallel.sharding.store import ParameterStore


def total_norm(store: ParameterStore, mesh: Mesh, others: Sequence[float | Tensor] = ()) -> tuple[Tensor, Tensor]:
    """The norm of the gradients that the store holds now, and the sums of `others` over the world."""
    norm = AllReduceNorm(store, mesh)
    norm.start(others)
    total = norm.total()
    return total[0], total[1:]
