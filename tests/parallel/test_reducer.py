"""How many reductions are in flight at a time: each that allocates buffers holds them until it has ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.mesh.layout import Coordinates
from megalite.mesh.mesh import Domain, MeshAxis
from megalite.parallel.collectives import Pending
from megalite.parallel.sharding import reducer as module
from megalite.parallel.sharding.reducer import GradientReducer
from megalite.parallel.sharding.transfers import TransferLog

SHARD, ALONE = MeshAxis("shard", 0, 2, (0, 1)), MeshAxis("replicate", 0, 1, (0,))


class Bucket:
    """As much of a ZeRO-2 bucket as the reducer asks for."""

    shards_only, compression, separate_embedding_grad, domain = True, None, None, Domain("dense", SHARD, ALONE)

    def __init__(self, number: int):
        self.full, self.value = torch.full((4,), float(number)), torch.zeros(2)

    def release_full(self) -> Tensor:
        return self.full

    def add_to_shard(self, part: Tensor) -> None:
        self.value += part


@pytest.mark.parametrize(
    "gloo, comm_dtype, most",
    [(False, torch.bfloat16, 2), (True, torch.bfloat16, 1), (True, None, 1), (False, None, 4)],
    ids=["NCCL in bf16", "gloo in bf16", "gloo", "NCCL in place"],
)
def test_reductions_in_flight(
    gloo: bool, comm_dtype: torch.dtype | None, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    flying: list[int] = []
    highest = 0

    def reduce_scatter(x: Tensor, axis: MeshAxis, comm_dtype: Any = None) -> Pending:
        nonlocal highest
        flying.append(int(x[0]))
        highest = max(highest, len(flying))

        def arrive() -> Tensor:
            assert flying.pop(0) == int(x[0]), "in order"
            return x[:2]

        return Pending([], arrive)

    monkeypatch.setattr(module, "reduces_in_place", lambda axis: not gloo)
    monkeypatch.setattr(module, "reduce_scatter", reduce_scatter)
    mesh: Any = SimpleNamespace(shard=SHARD, replicate=ALONE, expert_split=(), coordinates=Coordinates(), replicas={})
    reducer = GradientReducer(mesh, TransferLog(), comm_dtype)
    buckets: list[Any] = [Bucket(number) for number in range(4)]
    reducer.buckets = buckets
    for bucket in buckets:
        reducer.start(bucket)
    reducer.make_room(in_flight=0)
    assert highest == most and not flying
    assert [bucket.value[0].item() for bucket in buckets] == [0.0, 1.0, 2.0, 3.0], "each is added once"
