"""A ZeRO-2 bucket's buffer is not zeroed when it is opened: what is reduced is what was contributed, and zeros
elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.mesh.layout import Coordinates
from megalite.mesh.mesh import Domain, MeshAxis
from megalite.parallel.sharding.buckets import bucket_layout
from megalite.parallel.sharding.gradient_bucket import GradientBucket
from megalite.parallel.spec import ParamSpec, Segment
from megalite.parallel.weight import Weight
from megalite.parallel.weight_grad_queue import WeightGradQueue

SPECS = [
    ParamSpec(name, 1, (Segment(name, shape),)) for name, shape in (("a", (3, 5)), ("b", (7, 2)), ("rows", (6, 3)))
]


class Reducer:
    """Keeps the buffers that are reduced."""

    def __init__(self) -> None:
        self.reduced: list[Tensor] = []

    def make_room(self, in_flight: int) -> None: ...

    def start(self, bucket: GradientBucket) -> None:
        if bucket.full is None:
            bucket.open()
        self.reduced.append(bucket.release_full())


@pytest.fixture
def bucket(monkeypatch) -> tuple[GradientBucket, Reducer, dict[str, Weight]]:
    """A bucket on the first of two ranks; memory that is not initialized is full of NaN."""
    empty = torch.empty

    def garbage(*args: Any, **options: Any) -> Tensor:
        return empty(*args, **options).fill_(torch.nan)

    monkeypatch.setattr(torch, "empty", garbage)
    (layout,) = bucket_layout(SPECS, Coordinates(), {"dense": 2}, 1e9)
    domain, reducer = Domain("dense", MeshAxis("data", 0, 2, (0, 1)), MeshAxis("replicate", 0, 1, (0,))), Reducer()
    buffer = GradientBucket.allocate(layout, domain, 2, torch.float32, torch.device("cpu"), reducer)  # type: ignore[arg-type]
    weights = {
        spec.name: Weight(spec, torch.zeros(spec.segments[0].shape), torch.float32, WeightGradQueue()) for spec in SPECS
    }
    for weight in weights.values():
        buffer.add(weight)
    return buffer, reducer, weights


@pytest.mark.parametrize(
    "used", [("a", "b", "rows"), ("b",), ("rows", "a"), ()], ids=lambda used: "+".join(used) or "none"
)
def test_what_has_no_contribution_is_reduced_as_zeros(bucket, used) -> None:
    buffer, reducer, weights = bucket
    buffer.begin_step(2, 1.0)
    for _ in range(2):
        for name in used:
            weight = weights[name]
            if name == "rows":
                weight.accumulate_rows(torch.tensor([4, 1, 4]), torch.ones(3, 3))
            else:
                weight.accumulate(torch.full(weight.tensor.shape, 2.0))
    for weight in weights.values():
        weight.finish_step()
    assert len(reducer.reduced) == 2
    # of both microbatches: a buffer is reduced when all weights, used or not, are complete
    expected = torch.zeros(buffer.layout.size)
    for slot in buffer.layout.slots:
        part = expected[slot.start : slot.stop].view(slot.shape)
        if slot.spec.name in used:
            part[:] = torch.tensor([[0.0], [2], [0], [0], [4], [0]]) if slot.spec.name == "rows" else 4.0
    assert torch.equal(reducer.reduced[0] + reducer.reduced[1], expected)


def test_an_unused_weight_that_completes_before_the_buffer_exists(bucket) -> None:
    """An expert without tokens counts before the others contribute."""
    built, reducer, weights = bucket
    built.begin_step(1, 1.0)
    with weights["a"].accumulate_as_one():
        pass
    for name in ("b", "rows"):
        weights[name].accumulate(torch.ones(weights[name].tensor.shape))
    (buffer,) = reducer.reduced
    assert buffer.sum() == sum(weights[name].tensor.numel() for name in ("b", "rows"))
