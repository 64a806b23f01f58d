"""Adapters with trained row norms (DoRA, Liu et al. 2024): y = g · (W + scale · B A) x.

g = (‖W‖ + δ) / ‖W + scale · B A‖, with the norm of each row. As in PEFT, the norms are constants for the
gradient, and dropout applies to everything that the adapter changes: y = W x + (g · (W + scale · B A) - W)
dropout(x). PEFT trains the magnitude ‖W‖ + δ; here δ is trained and initialized to zero, so that the model
initially computes exactly the same as W alone, also in bf16.

The squared norms follow from ‖W‖² + 2 scale · W·(B A) + scale² · ‖B A‖² without a matrix of W's size.
Communication in forward:

    column   none: each rank has whole rows of W
    row      all-reduce of two numbers per output: a rank has a part of each row

Like the gradient of B, the gradient of δ is split like the outputs of a column-parallel layer, and partial in
a row-parallel layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megalite.parallel.collectives import all_reduce
from megalite.parallel.tensor.lora import AccumulateAdapter, Adapter, Mask


class DoraAdapter(Adapter):
    """Adapters of one stored matrix. Rows without an adapter, and adapted ones of norm 0, have g = 1."""

    def forward(self, x: Tensor, out: Tensor, mask: Mask | None) -> tuple[Tensor, ...]:
        """Apply the adapters to the layer's `out` ([seq, batch, out]) in place.

        Returns:
            the tensors that `backward` needs.
        """
        factors, norms = self._factors()
        dropped, rows = self.dropped(x, mask), out.flatten(0, -2)
        # With a bias W x is computed again: out - bias would lose what was rounded off beside a large bias.
        # [tokens, out]
        plain = (
            rows
            if mask is None and not self.biased
            else torch.mm(dropped.flatten(0, -2), self.base.matmuls.values().t())
        )
        adapted, inner = plain.clone(), self.inner(dropped)
        self.add(inner, adapted)
        scaled = adapted * factors  # in at least fp32
        # compute the difference first, because it is 0 before training
        rows.copy_(scaled if plain is rows else scaled.sub_(plain).add_(rows))
        return inner, adapted, factors, norms

    def backward(
        self, grad: Tensor, saved: Sequence[Tensor], mask: Mask | None
    ) -> tuple[Tensor, AccumulateAdapter]:
        """Compute `Adapter.backward`.

        The gradients of the magnitudes are accumulated immediately, like those of biases.
        """
        inner, adapted, factors, norms = saved
        rows = grad.flatten(0, -2)
        scaled = (rows * factors).to(rows.dtype)  # [tokens, out], the gradient of `adapted`
        lengths = (rows * adapted).sum(0, dtype=norms.dtype) / norms
        for part in self.parts:
            assert part.magnitude is not None
            part.magnitude.accumulate(lengths[part.columns])
        added, accumulate = self.gradients(scaled, inner, mask)
        weight = self.base.matmuls.values()
        if mask is None:
            return added.addmm_(scaled, weight).view(*grad.shape[:-1], -1), accumulate
        dx = torch.mm(rows, weight).view(*grad.shape[:-1], -1)
        added.addmm_(scaled - rows, weight)
        return dx.add_(self.dropped(added.view_as(dx), mask)), accumulate

    def _factors(self) -> tuple[Tensor, Tensor]:
        """Return g and ‖W + scale · B A‖ of each of this rank's outputs, in at least fp32.

        A norm of 0 is returned as 1.
        """
        weight = self.base.matmuls.values()
        dtype = torch.promote_types(weight.dtype, torch.float32)
        before = torch.linalg.vector_norm(weight, dim=1, dtype=dtype).square()
        after = before.clone()
        for a, part in zip(self.a.tensor.split(self.ranks), self.parts, strict=True):
            b, rows = part.b.tensor.to(dtype), part.columns
            after[rows] += 2 * part.scale * (torch.mm(weight[rows], a.t()).to(dtype) * b).sum(1)
            after[rows] += part.scale**2 * (torch.mm(b, torch.mm(a, a.t()).to(dtype)) * b).sum(1)
        if self.base.spec.segments[0].split == 1:
            before, after = all_reduce(torch.stack([before, after]), self.tp).wait()
        # a square may be negative because of rounding
        lengths, norms = before.sqrt(), after.clamp_(min=0).sqrt()
        empty, factors = norms == 0, torch.ones_like(norms)
        norms = norms.masked_fill(empty, 1)
        for part in self.parts:
            assert part.magnitude is not None
            own = part.columns
            factors[own] = (lengths[own] + part.magnitude.tensor) / norms[own]
        return factors.masked_fill_(empty, 1), norms
