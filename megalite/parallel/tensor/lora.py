"""The low-rank adapters of one linear layer (LoRA, Hu et al. 2021): y += scale · B A dropout(x).

No communication of their own. The linear layer passes them the whole sequence, with and without sequence parallelism, and they add to its
output and its input gradient before it communicates these. Partial gradients are summed over tp at the end of the step:

    column   A has whole inputs, but gradients of only this rank's outputs: its gradient is partial. B is split like the outputs
    row      A is split like the inputs. B has the products of this rank's part of A, and whole gradients: its gradient is partial
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from megalite.layout import Coordinates
from megalite.mesh import MeshAxis
from megalite.parallel.weight import Weight

Mask = Callable[..., Tensor]  # dropout of (x [seq, batch, channels], channel_offset); linear, so it is also its own gradient


class Adapter:
    """The adapters of n targeted segments of one stored matrix.

    Args:
        a: their A's, [n · rank, in], fused into one matrix.
        parts: for each, its B ([out, rank]) and the columns of the output that it adds to.
        scale: alpha / rank.
    """

    def __init__(self, a: Weight, parts: Sequence[tuple[Weight, slice]], scale: float, tp: MeshAxis):
        self.a, self.parts, self.scale = a, parts, scale
        self.first_channel = a.spec.segments[0].local(Coordinates.on("tp", tp.rank, tp.size)).offsets[1]

    def forward(self, x: Tensor, out: Tensor, mask: Mask | None) -> Tensor:
        """Add scale · B A dropout(x) to `out` ([seq, batch, out]), with x [seq, batch, in]. Returns scale · A x, [tokens, n · rank]."""
        inner = torch.mm(self._dropped(x, mask).flatten(0, -2), self.a.tensor.t()).mul_(self.scale)
        for each, (b, columns) in zip(inner.chunk(len(self.parts), 1), self.parts, strict=True):
            out.flatten(0, -2)[:, columns].addmm_(each, b.tensor.t())
        return inner

    def backward(self, grad: Tensor, dx: Tensor, inner: Tensor, mask: Mask | None) -> Callable[[Tensor], None]:
        """Add the adapters' input gradient to `dx` ([seq, batch, in]), from the output's `grad` and the forward's `inner`.

        Returns a function of x that accumulates the weight gradients: the column layer calls it once x is gathered, while dx is reduced.
        """
        rows, inners = grad.flatten(0, -2), inner.chunk(len(self.parts), 1)  # [tokens, out], n × [tokens, rank]
        # [tokens, n · rank]
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
    """Attach to each stored matrix its adapters, by name: NAME.lora_a of the matrix, NAME.lora_b of each of its segments."""
    at = Coordinates.on("tp", tp.rank, tp.size)
    for name, weight in weights.items():
        parts, first, a = [], 0, weights.get(name.removesuffix("weight") + "lora_a")
        for segment in weight.spec.segments if a else ():
            columns = slice(first, first := first + segment.local(at).shape[0])
            if b := weights.get(segment.name.removesuffix("weight") + "lora_b"):
                parts.append((b, columns))
        weight.adapter = Adapter(a, parts, scale, tp) if a else None
