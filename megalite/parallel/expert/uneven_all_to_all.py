"""All-to-all of uneven sizes over the ranks of an expert group, and its autograd functions.

On gloo each rank exchanges directly with every other one that it has rows for; on NCCL this is
torch.distributed's collective. `mesh.traffic` counts the calls, and as all_to_all_bytes the bytes that a rank
sends to others.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megalite_kernels.permutation import gather_rows
from torch import Tensor

from megalite.mesh.mesh import MeshAxis
from megalite.parallel.collectives import Pending, Work, all_gather, group_work, reduce_scatter


def all_to_all(x: Tensor, send: Sequence[int], receive: Sequence[int], axis: MeshAxis) -> Pending:
    """Send the first send[0] rows of x to rank 0 of the axis, and so on. The result has receive[r] rows from
    each rank r, in rank order."""
    if axis.size == 1:
        return Pending([], lambda: x)
    axis.traffic["all_to_all", axis.name] += 1
    axis.traffic["all_to_all_bytes", axis.name] += (len(x) - send[axis.rank]) * x[:1].numel() * x.itemsize
    x = x.contiguous()
    out = x.new_empty((sum(receive), *x.shape[1:]))
    if dist.get_backend(axis.group) != "gloo":
        sizes = list(receive), list(send)
        return Pending(
            [
                group_work(
                    lambda: dist.all_to_all_single(out, x, *sizes, group=axis.group, async_op=True),
                    "all_to_all",
                    axis,
                )
            ],
            lambda: out,
            x,
        )
    outgoing, incoming = x.split(list(send)), out.split(list(receive))
    incoming[axis.rank].copy_(outgoing[axis.rank])
    works = []
    # each rank starts with its own neighbour, so that no rank is the first target of all
    for step in range(1, axis.size):
        source, target = (axis.rank - step) % axis.size, (axis.rank + step) % axis.size
        for peer, tensor, operation in (
            (source, incoming[source], dist.irecv),
            (target, outgoing[target], dist.isend),
        ):
            if tensor.numel():
                start = partial(operation, tensor, axis.ranks[peer], group=axis.group)
                works.append(Work(start, f"all_to_all over {axis.name}", axis.activity, axis.ranks[peer]))
    return Pending(works, lambda: out, (x, outgoing, incoming))


class _Exchange(torch.autograd.Function):
    """Forward: all-to-all.  Backward: the same with the sizes swapped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, send: Sequence[int], receive: Sequence[int], axis: MeshAxis) -> Tensor:
        ctx.arguments = receive, send, axis
        return all_to_all(x, send, receive, axis).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all(grads[0], *ctx.arguments).wait(), None, None, None


class _Gather(torch.autograd.Function):
    """Forward: all-gather along dim 0.  Backward: reduce-scatter, since each rank has used the whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis) -> Tensor:
        ctx.axis = axis
        return all_gather(x, axis).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(grads[0], ctx.axis).wait(), None


class _ScatterSum(torch.autograd.Function):
    """Forward: reduce-scatter along dim 0.  Backward: all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis) -> Tensor:
        ctx.axis = axis
        return reduce_scatter(x, axis).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_gather(grads[0], ctx.axis).wait(), None


class _Reorder(torch.autograd.Function):
    """x[order], a permutation.  Backward: the inverse one. No communication."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return gather_rows(x, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return gather_rows(grads[0], inverse), None, None


def exchange(x: Tensor, send: Sequence[int], receive: Sequence[int], axis: MeshAxis) -> Tensor:
    return _Exchange.apply(x, send, receive, axis)


def gather(x: Tensor, axis: MeshAxis) -> Tensor:
    return _Gather.apply(x, axis)


def scatter_sum(x: Tensor, axis: MeshAxis) -> Tensor:
    return _ScatterSum.apply(x, axis)


def reorder(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    return _Reorder.apply(x, order, inverse)
