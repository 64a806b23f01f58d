"""The gradient of learned positions has the same bits on every tp rank, in whatever order a GPU's atomics add."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.mesh.mesh import MeshAxis
from megalite.parallel.spec import ParamSpec, Segment
from megalite.parallel.tensor.embedding import ParallelEmbedding
from megalite.parallel.weight import Weight
from megalite.parallel.weight_grad_queue import WeightGradQueue

SEQUENCE, BATCH, HIDDEN = 96, 3, 8


class Atomics(TorchDispatchMode):
    """Adds the rows of `index_add_` in an order of its own, as another GPU would."""

    def __init__(self, seed: int):
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.index_add_.default:
            target, dim, rows, values = args
            order = torch.randperm(len(rows), generator=self.generator)
            args = (target, dim, rows[order], values[order])
        return func(*args, **(kwargs or {}))


def weight(rows: int, values: Tensor) -> Weight:
    spec = ParamSpec("table", 0, (Segment("table", (rows, HIDDEN)),))
    weight = Weight(spec, values.clone().requires_grad_(), torch.float32, WeightGradQueue())
    weight.grad = torch.full((rows, HIDDEN), torch.nan)
    weight.begin_step(2, 1)
    return weight


def gradient(positions: Tensor, seed: int) -> Tensor:
    """Two microbatches' gradient of the position table on one tp rank."""
    generator = torch.Generator().manual_seed(1)
    tables = [torch.randn(rows, HIDDEN, generator=generator) for rows in (50, SEQUENCE)]
    tokens, grads = (
        torch.randint(50, (SEQUENCE, BATCH), generator=generator),
        torch.randn(2, SEQUENCE, BATCH, HIDDEN, generator=generator),
    )
    words, places = weight(50, tables[0]), weight(SEQUENCE, tables[1])
    layer = ParallelEmbedding(words, places, MeshAxis("tp", 0, 1, (0,)), sequence_parallel=False)
    with Atomics(seed):
        for grad in grads:
            layer(tokens, positions).backward(grad)
    assert places.grad is not None
    exact = torch.zeros(SEQUENCE, HIDDEN, dtype=torch.float64)
    exact.index_add_(0, positions.expand(SEQUENCE, BATCH).reshape(-1), grads.double().sum(0).flatten(0, 1))
    torch.testing.assert_close(places.grad.double(), exact, rtol=1e-5, atol=1e-5)
    return places.grad


@pytest.mark.parametrize("documents", [False, True])
def test_tp_ranks_hold_the_same_bits(documents: bool) -> None:
    positions = torch.arange(SEQUENCE).unsqueeze(1)  # [seq, 1]: equal in all rows
    if documents:  # [seq, batch]: a position occurs several times in a row
        positions = torch.stack([torch.arange(SEQUENCE) % length for length in (7, 30, 96)], 1)
    assert torch.equal(gradient(positions, seed=2), gradient(positions, seed=3))
