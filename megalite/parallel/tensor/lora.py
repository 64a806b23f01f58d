"""Low-rank adapters of one linear layer (LoRA, Hu et al. 2021): y += scale · B A dropout(x).

The adapters do no communication of their own. The linear layer passes them the whole sequence, with and
without sequence parallelism, and they add to its output and its input gradient before it communicates these.
Partial gradients are summed over tp at the end of the step:

    column   A has whole inputs, but gradients of only this rank's outputs: its gradient is partial. B is
             split like the outputs.
    row      A is split like the inputs. B has the product with this rank's part of A, and whole gradients:
             its gradient is partial.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from megalite.config.sections.lora import LoraConfig
from megalite.mesh.layout import Coordinates
from megalite.mesh.mesh import MeshAxis
from megalite.parallel.weight import Weight, Weights

# dropout of (x [seq, batch, channels], channel_offset); linear, so it is also its own gradient
Mask = Callable[..., Tensor]
# accumulates an adapter's weight gradients, given the layer's input [seq, batch, in]
AccumulateAdapter = Callable[[Tensor], None]


class SegmentAdapter(NamedTuple):
    """Adapter of one segment of a stored matrix, without A.

    Attributes:
        b: B [out, rank].
        columns: the columns of the output that it adds to.
        rank: number of columns of B, and rows of A.
        scale: factor on B A.
        magnitude: see `parallel.tensor.dora`.
    """

    b: Weight
    columns: slice
    rank: int
    scale: float
    magnitude: Weight | None


class Adapter:
    """Adapters of the targeted segments of one stored matrix.

    Args:
        base: the stored matrix.
        a: matrices A of all segments, [Σ rank, in], fused into one matrix.
        biased: whether the layer has added a bias to its output before the adapter does.
    """

    def __init__(self, base: Weight, a: Weight, parts: Sequence[SegmentAdapter], biased: bool, tp: MeshAxis):
        self.base, self.a, self.parts, self.biased, self.tp = base, a, parts, biased, tp
        self.ranks = [part.rank for part in parts]
        self.first_channel = a.spec.segments[0].local(Coordinates.on("tp", tp.rank, tp.size)).offsets[1]

    def forward(self, x: Tensor, out: Tensor, mask: Mask | None) -> tuple[Tensor, ...]:
        """Add scale · B A dropout(x) to `out` ([seq, batch, out]), with x [seq, batch, in].

        Returns:
            the tensors that `backward` needs.
        """
        inner = self.inner(self.dropped(x, mask))
        self.add(inner, out.flatten(0, -2))
        return (inner,)

    def inner(self, x: Tensor) -> Tensor:
        """Compute scale · A x, [tokens, Σ rank]."""
        inner = torch.mm(x.flatten(0, -2), self.a.tensor.t())
        for each, part in zip(inner.split(self.ranks, 1), self.parts, strict=True):
            each.mul_(part.scale)
        return inner

    def add(self, inner: Tensor, rows: Tensor) -> None:
        """Add B times `inner` to `rows` [tokens, out]."""
        for each, part in zip(inner.split(self.ranks, 1), self.parts, strict=True):
            rows[:, part.columns].addmm_(each, part.b.tensor.t())

    def backward(
        self, grad: Tensor, saved: Sequence[Tensor], mask: Mask | None
    ) -> tuple[Tensor, AccumulateAdapter]:
        """Compute the gradient of the input, [seq, batch, in].

        Args:
            grad: gradient of the output, [seq, batch, out].
            saved: result of the forward.

        Returns:
            the gradient, and a function of x that accumulates the weight gradients. The column layer calls it
            once x is gathered, while the input gradient is reduced.
        """
        (inner,) = saved
        rows = grad.flatten(0, -2)
        dx = self.base.matmuls.input_gradient(rows).view(*grad.shape[:-1], -1)
        added, accumulate = self.gradients(rows, inner, mask)
        return dx.add_(self.dropped(added.view_as(dx), mask)), accumulate

    def gradients(self, rows: Tensor, inner: Tensor, mask: Mask | None) -> tuple[Tensor, AccumulateAdapter]:
        """Compute the gradient of the dropped input through B A, [tokens, in].

        Args:
            rows: gradient of the output.

        Returns:
            the gradient, and the function of x that `backward` returns.
        """
        # [tokens, Σ rank]
        dinner = torch.cat(
            [torch.mm(rows[:, part.columns], part.b.tensor).mul_(part.scale) for part in self.parts], 1
        )

        def accumulate(x: Tensor) -> None:
            self.a.accumulate_matmul(dinner, self.dropped(x, mask).flatten(0, -2))
            for each, part in zip(inner.split(self.ranks, 1), self.parts, strict=True):
                part.b.accumulate_matmul(rows[:, part.columns], each)

        return torch.mm(dinner, self.a.tensor), accumulate

    def dropped(self, x: Tensor, mask: Mask | None) -> Tensor:
        return x if mask is None else mask(x, channel_offset=self.first_channel)


def attach_adapters(weights: Weights, lora: LoraConfig, tp: MeshAxis) -> None:
    """Attach adapters to each stored matrix by name.

    They are NAME.lora_a of the matrix and NAME.lora_b of each of its segments.
    """
    kind: type[Adapter] = Adapter
    if lora.dora:
        from megalite.parallel.tensor.dora import DoraAdapter

        kind = DoraAdapter
    for name, weight in weights.items():
        stem = name.removesuffix("weight")
        if (a := weights.get(f"{stem}lora_a")) and weight.spec.domain == "expert":
            from megalite.parallel.expert.grouped_matmul import ExpertAdapter

            weight.expert_adapter = ExpertAdapter(
                a, weights[f"{stem}lora_b"], lora.scale_of(weight.spec.segments[0].role)
            )
        elif a:
            # The bias of a row-parallel layer is added later, after its reduction.
            biased = weight.spec.segments[0].split != 1 and f"{stem}bias" in weights
            weight.adapter = kind(weight, a, _parts(weight, weights, lora, tp), biased, tp)


@contextmanager
def without_adapters(weights: Weights) -> Iterator[None]:
    """Compute with the stored matrices alone in the block."""
    adapters = {weight: (weight.adapter, weight.expert_adapter) for weight in weights.values()}
    try:
        for weight in adapters:
            weight.adapter = weight.expert_adapter = None
        yield
    finally:
        for weight, (adapter, expert_adapter) in adapters.items():
            weight.adapter, weight.expert_adapter = adapter, expert_adapter


def _parts(weight: Weight, weights: Weights, lora: LoraConfig, tp: MeshAxis) -> list[SegmentAdapter]:
    at, first, adapters = Coordinates.on("tp", tp.rank, tp.size), 0, []
    for segment in weight.spec.segments:
        columns = slice(first, first := first + segment.local(at).shape[0])
        stem = segment.name.removesuffix("weight")
        if b := weights.get(f"{stem}lora_b"):
            scale, rank = lora.scale_of(segment.role), b.tensor.shape[1]
            adapters.append(SegmentAdapter(b, columns, rank, scale, weights.get(f"{stem}lora_magnitude")))
    return adapters
