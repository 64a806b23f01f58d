"""Autograd functions that move rows between the ranks of an expert group, or reorder them.

`axis.traffic` counts the calls, and under all_to_all_bytes the bytes that a rank sends to others.
"""

from __future__ import annotations

from typing import Any

import torch
from megalite_kernels.permutation import gather_rows
from torch import Tensor

from megalite.mesh.mesh import MeshAxis
from megalite.parallel.all_to_all import all_to_all
from megalite.parallel.collectives import Pending, all_gather, reduce_scatter


def _all_to_all(x: Tensor, send: list[int], receive: list[int], axis: MeshAxis) -> Pending:
    """Start an all-to-all of rows, and count the bytes that this rank sends to others."""
    if axis.size > 1:
        row_bytes = x[:1].numel() * x.itemsize
        axis.traffic["all_to_all_bytes", axis.name] += (len(x) - send[axis.rank]) * row_bytes
    return all_to_all(x, axis, send, receive)


class _Exchange(torch.autograd.Function):
    """Forward: all-to-all. Backward: all-to-all with the sizes swapped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, send: list[int], receive: list[int], axis: MeshAxis) -> Tensor:
        ctx.arguments = receive, send, axis
        return _all_to_all(x, send, receive, axis).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grads[0], *ctx.arguments).wait(), None, None, None


class _Gather(torch.autograd.Function):
    """Forward: all-gather along dim 0. Backward: reduce-scatter, as each rank has used the whole tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis) -> Tensor:
        ctx.axis = axis
        return all_gather(x, axis).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(grads[0], ctx.axis).wait(), None


class _ScatterSum(torch.autograd.Function):
    """Forward: reduce-scatter along dim 0. Backward: all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis) -> Tensor:
        ctx.axis = axis
        return reduce_scatter(x, axis).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_gather(grads[0], ctx.axis).wait(), None


class _Reorder(torch.autograd.Function):
    """x[order] for a permutation. Backward: the inverse permutation. No communication."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return gather_rows(x, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return gather_rows(grads[0], inverse), None, None


def exchange(x: Tensor, send: list[int], receive: list[int], axis: MeshAxis) -> Tensor:
    return _Exchange.apply(x, send, receive, axis)


def gather(x: Tensor, axis: MeshAxis) -> Tensor:
    return _Gather.apply(x, axis)


def scatter_sum(x: Tensor, axis: MeshAxis) -> Tensor:
    return _ScatterSum.apply(x, axis)


def reorder(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    return _Reorder.apply(x, order, inverse)
