"""Adapters of a column- and of a row-parallel linear against torch's autograd, dropout included."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from megalite_kernels.dropout import dropout
from torch import Tensor

from megalite.mesh import Layout, Mesh
from megalite.parallel.compiled_ops import CompiledOps
from megalite.parallel.spec import ParamSpec, Segment
from megalite.parallel.tensor.linear import Activation, ColumnParallelLinear, RowParallelLinear
from megalite.parallel.tensor.lora import attach_adapters
from megalite.parallel.weight import Weight
from megalite.parallel.weight_grad_queue import WeightGradQueue

WIDTH, PARTS, RANK, SCALE = 6, {"q": 4, "k": 3, "v": 5}, 2, 1.5
MASK = partial(dropout, key=7, samples=torch.arange(2), positions=torch.arange(5), p=0.4)


def weight(queue: WeightGradQueue, name: str, *segments: Segment, trained: bool) -> Weight:
    rows = sum(segment.shape[0] for segment in segments)
    value = torch.randn(rows, *segments[0].shape[1:], dtype=torch.float64).requires_grad_()
    made = Weight(ParamSpec(name, 1, segments), value, torch.float64 if trained else None, queue)
    made.grad = torch.full_like(value, torch.nan) if trained else None
    made.begin_step(1, 1)
    return made


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_outputs_and_gradients(kind, masked, deferred):
    torch.manual_seed(0)
    queue = WeightGradQueue()
    queue.deferred = deferred
    parts = PARTS if kind == "column" else {"down": 7}
    adapted = {"q": slice(0, 4), "v": slice(7, 12)} if kind == "column" else {"down": slice(0, 7)}
    base = [Segment(f"{part}.weight", (rows, WIDTH)) for part, rows in parts.items()]
    stored = {"x.weight": weight(queue, "x.weight", *base, trained=False)}
    stored["x.lora_a"] = weight(queue, "x.lora_a", *(Segment(f"{part}.lora_a", (RANK, WIDTH)) for part in adapted), trained=True)
    for part in adapted:
        stored[f"{part}.lora_b"] = weight(queue, part, Segment(f"{part}.lora_b", (parts[part], RANK)), trained=True)
    tp = Mesh(Layout()).tp
    attach_adapters(stored, SCALE, tp)
    if kind == "column":
        layer = ColumnParallelLinear(stored["x.weight"], None, tp, False)
    else:
        layer = RowParallelLinear(stored["x.weight"], None, tp, False, Activation("silu", False, CompiledOps()))
    x = torch.randn(5, 2, WIDTH, dtype=torch.float64, requires_grad=True)
    gradient = torch.randn(5, 2, sum(parts.values()), dtype=torch.float64)

    def plain(x: Tensor, a: Tensor, *bs: Tensor) -> Tensor:
        x = x if kind == "column" else torch.nn.functional.silu(x)
        keep = MASK(torch.ones_like(x)) if masked else 1.0  # the factor of each element: 0, or what the kept ones are scaled by
        out, inner = x @ stored["x.weight"].tensor.t(), (x * keep) @ a.t()
        for index, (b, rows) in enumerate(zip(bs, adapted.values(), strict=True)):
            part = inner[..., index * RANK : (index + 1) * RANK] @ b.t()
            out = out + SCALE * torch.nn.functional.pad(part, (rows.start, out.shape[-1] - rows.stop))
        return out

    trained = [stored["x.lora_a"], *(stored[f"{part}.lora_b"] for part in adapted)]
    out = layer(x, MASK if masked else None)
    expected = plain(x, *(each.tensor for each in trained))
    torch.testing.assert_close(out, expected)
    wanted = torch.autograd.grad(expected, [x, *(each.tensor for each in trained)], gradient)
    out.backward(gradient)
    with torch.no_grad():  # as the pipeline's runtime does
        queue.run(0, 0)
    torch.testing.assert_close([x.grad, *(each.grad for each in trained)], list(wanted))
    assert stored["x.weight"].grad is None
