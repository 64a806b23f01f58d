"""Adapters of a column- and of a row-parallel linear against torch's autograd, dropout and trained row lengths (DoRA)
included."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from megalite_kernels.dropout import dropout
from torch import Tensor

from megalite.config.sections.lora import LoraConfig
from megalite.mesh.mesh import Layout, Mesh
from megalite.parallel.compiled_ops import CompiledOps
from megalite.parallel.spec import ParamSpec, Segment
from megalite.parallel.tensor.linear import Activation, ColumnParallelLinear, RowParallelLinear
from megalite.parallel.tensor.lora import attach_adapters
from megalite.parallel.weight import Weight
from megalite.parallel.weight_grad_queue import WeightGradQueue

WIDTH, PARTS = 6, {"q": 4, "k": 3, "v": 5}
LORA = LoraConfig(rank=2, alpha=3.0, ranks={"v": 3}, alphas={"v": 2.4})
RANKS, SCALES = {"q": 2, "v": 3, "down": 2}, {"q": 1.5, "v": 0.8, "down": 1.5}
MASK = partial(dropout, key=7, samples=torch.arange(2), positions=torch.arange(5), p=0.4)


def weight(queue: WeightGradQueue, name: str, *segments: Segment, trained: bool) -> Weight:
    rows = sum(segment.shape[0] for segment in segments)
    value = torch.randn(rows, *segments[0].shape[1:], dtype=torch.float64).requires_grad_()
    weight = Weight(ParamSpec(name, 1, segments), value, torch.float64 if trained else None, queue)
    weight.grad = torch.full_like(value, torch.nan) if trained else None
    weight.begin_step(1, 1)
    return weight


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", ["column", "column with bias", "row"])
def test_outputs_and_gradients(kind, masked, deferred, dora):
    torch.manual_seed(0)
    queue = WeightGradQueue()
    queue.deferred = deferred
    by_rows, parts = kind != "row", {"down": 7} if kind == "row" else PARTS
    adapted = {"q": slice(0, 4), "v": slice(7, 12)} if by_rows else {"down": slice(0, 7)}
    base = [Segment(f"{part}.weight", (rows, WIDTH), 0 if by_rows else 1, role=part) for part, rows in parts.items()]
    stored = {"x.weight": weight(queue, "x.weight", *base, trained=False)}
    stored["x.lora_a"] = weight(
        queue, "x.lora_a", *(Segment(f"{part}.lora_a", (RANKS[part], WIDTH)) for part in adapted), trained=True
    )
    for part in adapted:
        stored[f"{part}.lora_b"] = weight(
            queue, part, Segment(f"{part}.lora_b", (parts[part], RANKS[part])), trained=True
        )
        if dora:
            stored[f"{part}.lora_magnitude"] = weight(
                queue, part, Segment(f"{part}.lora_magnitude", (parts[part],)), trained=True
            )
    bias = weight(
        queue, "x.bias", *(Segment(f"{part}.bias", (rows,), 0) for part, rows in parts.items()), trained=False
    )
    stored |= {"x.bias": bias} if kind == "column with bias" else {}
    tp = Mesh(Layout()).tp
    attach_adapters(stored, replace(LORA, dora=dora), tp)
    if by_rows:
        layer = ColumnParallelLinear(stored["x.weight"], stored.get("x.bias"), tp, False)
    else:
        layer = RowParallelLinear(stored["x.weight"], None, tp, False, Activation("silu", False, CompiledOps()))
    x = torch.randn(5, 2, WIDTH, dtype=torch.float64, requires_grad=True)
    gradient = torch.randn(5, 2, sum(parts.values()), dtype=torch.float64)

    def plain(x: Tensor) -> Tensor:
        x = x if by_rows else torch.nn.functional.silu(x)
        dropped = x * MASK(torch.ones_like(x)) if masked else x
        out = x @ stored["x.weight"].tensor.t() + (stored["x.bias"].tensor if "x.bias" in stored else 0)
        for a, (part, rows) in zip(
            stored["x.lora_a"].tensor.split([RANKS[part] for part in adapted]), adapted.items(), strict=True
        ):
            before = stored["x.weight"].tensor[rows]
            after = before + SCALES[part] * stored[f"{part}.lora_b"].tensor @ a
            if dora:  # as PEFT: the magnitude starts at the rows' lengths, and their present lengths are constants
                magnitude = before.norm(dim=1).detach() + stored[f"{part}.lora_magnitude"].tensor
                after = (magnitude / after.norm(dim=1).detach()).unsqueeze(1) * after
            added = dropped @ (after - before).t()
            out = out + torch.nn.functional.pad(added, (rows.start, out.shape[-1] - rows.stop))
        return out

    trained = [each for each in stored.values() if each.trainable]
    out, expected = layer(x, MASK if masked else None), plain(x)
    torch.testing.assert_close(out, expected)
    wanted = torch.autograd.grad(expected, [x, *(each.tensor for each in trained)], gradient)
    out.backward(gradient)
    with torch.no_grad():  # as the pipeline's runtime does
        queue.run(0, 0)
    torch.testing.assert_close([x.grad, *(each.grad for each in trained)], list(wanted))
    assert stored["x.weight"].grad is None and len(trained) == (1 + len(adapted) * (2 if dora else 1))


def untrained(
    value: Tensor, adapted: int, bias: Tensor | None = None
) -> tuple[ColumnParallelLinear, dict[str, Weight]]:
    """A linear with adapters (DoRA) as training starts, of its first `adapted` rows, and its weights by name."""
    rows = len(value)
    parts = {"q": adapted} | ({"k": rows - adapted} if adapted < rows else {})
    zeros = partial(torch.zeros, dtype=value.dtype)
    tensors = {"x.weight": value, "x.lora_a": torch.randn(2, WIDTH).to(value.dtype)}
    tensors |= {"q.lora_b": zeros(adapted, 2), "q.lora_magnitude": zeros(adapted)} | (
        {} if bias is None else {"x.bias": bias}
    )
    stored = {}
    for name, tensor in tensors.items():
        segments = [Segment(name, tuple(tensor.shape))]
        if name == "x.weight":
            segments = [Segment(f"{part}.weight", (count, WIDTH), 0, role=part) for part, count in parts.items()]
        trained = "lora" in name
        spec, grad = ParamSpec(name, 1, tuple(segments)), torch.float32 if trained else None
        stored[name] = Weight(spec, tensor.requires_grad_(trained), grad, WeightGradQueue())
        stored[name].grad = torch.full_like(tensor, torch.nan, dtype=grad) if trained else None
        stored[name].begin_step(1, 1)
    tp = Mesh(Layout()).tp
    attach_adapters(stored, replace(LORA, dora=True, targets=["q"]), tp)
    return ColumnParallelLinear(stored["x.weight"], stored.get("x.bias"), tp, False), stored


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_row_lengths_that_have_not_been_trained_change_nothing(biased, masked):
    """In bf16 too, where no rounding of a stored length may change the model that training starts from. Neither a bias
    that is large beside W x nor dropout makes the gradient of the lengths less exact."""
    torch.manual_seed(0)
    value, bias = torch.randn(8, WIDTH).bfloat16(), 100 * torch.randn(8).bfloat16()
    layer, stored = untrained(value, adapted=8, bias=bias if biased else None)
    x, gradient = torch.randn(5, 2, WIDTH).bfloat16(), torch.randn(5, 2, 8).bfloat16()
    rows = x.flatten(0, 1)
    out = layer(x.requires_grad_(), MASK if masked else None)
    assert torch.equal(out.flatten(0, 1), torch.addmm(bias, rows, value.t()) if biased else rows @ value.t())
    out.backward(gradient)
    dropped = (MASK(x) if masked else x).double()
    wanted = (gradient.double() * (dropped @ value.double().t())).sum((0, 1)) / value.double().norm(dim=1)
    assert (stored["q.lora_magnitude"].grad - wanted).norm() <= 2**-8 * wanted.norm(), "what bf16 rounds off W x"


@pytest.mark.parametrize("adapted", [False, True])
def test_a_row_of_zeros_stays_zero_and_disturbs_nothing(adapted):
    """Its length is zero, which no factor can change: padding, or a projection that starts at zero."""
    torch.manual_seed(0)
    value = torch.randn(8, WIDTH)
    value[3 if adapted else 6] = 0
    layer, stored = untrained(value, adapted=4)
    x = torch.randn(5, 2, WIDTH, requires_grad=True)
    out = layer(x)
    torch.testing.assert_close(out, x @ value.t())
    out.sum().backward()
    torch.testing.assert_close(x.grad, value.sum(0).expand_as(x))
    for name in ("x.lora_a", "q.lora_b", "q.lora_magnitude"):
        assert stored[name].grad.isfinite().all(), name
    assert stored["q.lora_b"].grad.any(1).all(), "every adapted row is trained"
