"""Matrix products of rows that are sorted by expert with each expert's matrices. No communication.

The loop over experts is the reference, and what runs on a CPU. On a GPU one grouped kernel computes a whole product.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megalite.parallel.tensor.linear import Activation
from megalite.parallel.weight import Weight

if TYPE_CHECKING:
    from megalite.parallel.expert.lora import ExpertAdapter

_ALIGNED = 16  # bytes: torch's grouped kernel reads rows of this alignment


def product_loop(rows: Tensor, matrices: Tensor, sizes: Sequence[int]) -> Tensor:
    """The first sizes[0] rows times matrices[0], and so on: [n, in], [experts, in, out] -> [n, out]."""
    out = rows.new_empty(rows.shape[0], matrices.shape[2])
    for own, matrix, into in zip(rows.split(list(sizes)), matrices, out.split(list(sizes)), strict=True):
        torch.mm(own, matrix, out=into)
    return out


def grouped_product(rows: Tensor, matrices: Tensor, sizes: Sequence[int]) -> Tensor:
    """As `product_loop`, in one kernel where there is one: on a GPU, in bf16."""
    aligned = all(size * rows.itemsize % _ALIGNED == 0 for size in matrices.shape[1:])
    if not rows.is_cuda or rows.dtype != torch.bfloat16 or not aligned:
        return product_loop(rows, matrices, sizes)
    ends = torch.tensor(list(accumulate(sizes)), dtype=torch.int32).to(rows.device, non_blocking=True)
    return torch.nn.functional.grouped_mm(rows, matrices, offs=ends)


class _Experts(torch.autograd.Function):
    """down(act(in(x))) of rows sorted by expert. Backward: the input's gradient; weight gradients go to the queue."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, into: Tensor, down: Tensor, layer: Experts, sizes: Sequence[int]) -> Tensor:
        ctx.layer, ctx.sizes, (first, second) = layer, sizes, layer.adapters
        inner = grouped_product(rows, layer.each(into).transpose(1, 2), sizes)  # [n, (2 ·) width]
        layer.add_bias(inner, 0, sizes)
        low_in = None if first is None else first.add(rows, inner, sizes)
        active = layer.activation.forward(inner)  # [n, width]
        out = grouped_product(active, layer.each(down).transpose(1, 2), sizes)  # [n, hidden]
        layer.add_bias(out, 1, sizes)
        low_down = None if second is None else second.add(active, out, sizes)
        ctx.save_for_backward(rows if layer.into.trainable or first is not None else None, inner, low_in, low_down)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (rows, inner, low_in, low_down), layer, sizes, grad = ctx.saved_tensors, ctx.layer, ctx.sizes, grads[0]
        first, second = layer.adapters
        dactive = grouped_product(grad, layer.each(layer.down.tensor), sizes)  # [n, width]
        dlow_down = None if second is None else second.add_gradient(grad, dactive, sizes)
        dinner, active = layer.activation.backward(dactive, inner)
        dx = grouped_product(dinner, layer.each(layer.into.tensor), sizes)  # [n, hidden]
        dlow_in = None if first is None else first.add_gradient(dinner, dx, sizes)
        layer.down.accumulate_product(grad, active, sizes)
        layer.accumulate_biases((dinner, grad), sizes)
        if second is not None:
            second.accumulate(grad, active, low_down, dlow_down, sizes)
        if rows is not None:
            layer.into.accumulate_product(dinner, rows, sizes)
        if first is not None:
            first.accumulate(dinner, rows, low_in, dlow_in, sizes)
        return dx, None, None, None, None


class Experts(nn.Module):
    """This rank's experts, each a feed-forward: rows [n, hidden] sorted by expert -> [n, hidden].

    Args:
        into, down: their matrices, expert after expert: [experts · (2 ·) width, hidden] and [experts · hidden, width].
        biases: theirs, [experts · (2 ·) width] and [experts · hidden].
        number: experts on this rank.
    """

    def __init__(self, into: Weight, down: Weight, biases: tuple[Weight | None, Weight | None], number: int, activation: Activation):
        super().__init__()
        self.into, self.down, self.biases, self.number, self.activation = into, down, biases, number, activation

    @property
    def adapters(self) -> tuple[ExpertAdapter | None, ExpertAdapter | None]:
        """Those of both matrices."""
        return self.into.expert_adapter, self.down.expert_adapter

    def each(self, matrices: Tensor) -> Tensor:
        """A view of stacked matrices: [experts · out, in] -> [experts, out, in]."""
        return matrices.view(self.number, -1, matrices.shape[1])

    def add_bias(self, out: Tensor, which: int, sizes: Sequence[int]) -> None:
        """Add each expert's bias of the first or second product to its rows of `out`."""
        if (bias := self.biases[which]) is not None:
            for own, rows in zip(bias.tensor.view(self.number, -1), out.split(list(sizes)), strict=True):
                rows.add_(own)

    def accumulate_biases(self, grads: Sequence[Tensor], sizes: Sequence[int]) -> None:
        """Accumulate the gradients of both biases, given those of the products; zero for an expert without rows."""
        for bias, grad in zip(self.biases, grads, strict=True):
            if bias is not None:
                bias.accumulate(torch.cat([rows.sum(0, dtype=bias.grad_dtype) for rows in grad.split(list(sizes))]))

    def forward(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """`sizes`: rows of each expert."""
        return _Experts.apply(rows, self.into.tensor, self.down.tensor, self, sizes)
