"""The low-rank adapters of one linear layer (LoRA, Hu et al. 2021): y += scale · B A dropout(x).

They communicate nothing. The linear gives them the whole sequence, with and without sequence parallelism, and what they add to its output
and to its input gradient is there before it communicates. On each tp rank, where partial gradients are summed at the end of the step:

    column   A sees whole inputs, and gradients of this rank's outputs alone: its gradient is partial. B is split like the outputs
    row      A is split like the inputs. B sees what this rank's part of A makes of them, and whole gradients: its gradient is partial
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from megalite.layout import Coordinates
from megalite.mesh import MeshAxis
from megalite.parallel.weight import Weight

Mask = Callable[..., Tensor]  # dropout of (x [seq, batch, channels], channel_offset); of the gradient of x: its own gradient


class Adapter:
    """The adapters of the targeted segments of one stored matrix, with `scale`, alpha / rank.

    `a` are their A's, [n · rank, in]; `parts` are, for each, its B ([out, rank]) and the columns of the output that it adds to.
    """

    def __init__(self, a: Weight, parts: Sequence[tuple[Weight, slice]], scale: float, tp: MeshAxis):
        self.a, self.parts, self.scale = a, parts, scale
        self.first_channel = a.spec.segments[0].local(Coordinates.on("tp", tp.rank, tp.size)).offsets[1]

    def forward(self, x: Tensor, out: Tensor, mask: Mask | None) -> Tensor:
        """Add to `out` ([seq, batch, out]) what they make of x ([seq, batch, in]). Returns scale · A x, [tokens, n · rank]."""
        inner = torch.mm(self._dropped(x, mask).flatten(0, -2), self.a.tensor.t()).mul_(self.scale)
        for each, (b, columns) in zip(inner.chunk(len(self.parts), 1), self.parts, strict=True):
            out.flatten(0, -2)[:, columns].addmm_(each, b.tensor.t())
        return inner

    def backward(self, grad: Tensor, dx: Tensor, inner: Tensor, mask: Mask | None) -> Callable[[Tensor], None]:
        """Add to `dx` the input gradient of `grad`, that of the output. Returns what hands over the weight gradients, given x."""
        rows, inners = grad.flatten(0, -2), inner.chunk(len(self.parts), 1)
        dinner = torch.cat([torch.mm(rows[:, columns], b.tensor) for b, columns in self.parts], 1).mul_(self.scale)
        dx.add_(self._dropped(torch.mm(dinner, self.a.tensor).view_as(dx), mask))

        def accumulate(x: Tensor) -> None:
            self.a.accumulate_product(dinner, self._dropped(x, mask).flatten(0, -2))
            for each, (b, columns) in zip(inners, self.parts, strict=True):
                b.accumulate_product(rows[:, columns], each)

        return accumulate

    def _dropped(self, x: Tensor, mask: Mask | None) -> Tensor:
        return x if mask is None else mask(x, channel_offset=self.first_channel)


def attach_adapters(weights: Mapping[str, Weight], scale: float, tp: MeshAxis) -> None:
    """Give each stored matrix the adapters that are stored beside it."""
    at = Coordinates.on("tp", tp.rank, tp.size)
    for name, weight in weights.items():
        parts, first, a = [], 0, weights.get(name.removesuffix("weight") + "lora_a")
        for segment in weight.spec.segments if a else ():
            columns = slice(first, first := first + segment.local(at).shape[0])
            if b := weights.get(segment.name.removesuffix("weight") + "lora_b"):
                parts.append((b, columns))
        weight.adapter = Adapter(a, parts, scale, tp) if a else None
