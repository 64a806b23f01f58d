"""What the methods of context parallelism send over the cp axis, started and awaited separately.
`axis.traffic` counts it.

The axis has a communicator of its own: nothing here waits for a gradient reduction.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.mesh.mesh import MeshAxis
from megalite.parallel.collectives import Pending, Work, exchange, group_work


def all_to_all(x: Tensor, axis: MeshAxis) -> Pending:
    """Part i of x goes to rank i, whose part for this rank becomes part i of the result: [size, …] -> [size,
    …], contiguous."""
    axis.traffic["all_to_all", axis.name] += 1
    x, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    if dist.get_backend(axis.group) != "gloo":
        start = partial(dist.all_to_all_single, out, x, group=axis.group, async_op=True)
        return Pending([group_work(start, "all_to_all", axis)], lambda: out, x)
    works = exchange(list(x), list(out), axis, "all_to_all")
    out[axis.rank].copy_(x[axis.rank])
    return Pending(works, lambda: out, x)


def pass_on(x: Tensor, axis: MeshAxis) -> Pending:
    """Send x to the next rank of the ring, and receive the previous rank's, of the same shape: one hop."""
    axis.traffic["hop", axis.name] += 1
    x, received = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    target, source = axis.ranks[(axis.rank + 1) % axis.size], axis.ranks[axis.rank - 1]
    send, receive = (
        partial(dist.isend, x, target, group=axis.group),
        partial(dist.irecv, received, source, group=axis.group),
    )
    if dist.get_backend(axis.group) == "gloo":
        works = [
            Work(send, "hop over cp", axis.activity, target),
            Work(receive, "hop over cp", axis.activity, source),
        ]
    else:  # both in one batch: NCCL would finish the send before it starts the receive, on every rank
        operations = [
            dist.P2POp(dist.isend, x, target, axis.group),
            dist.P2POp(dist.irecv, received, source, axis.group),
        ]
        # One work for the whole batch, as NCCL groups it.
        works = [Work(lambda: dist.batch_isend_irecv(operations)[-1], "hop over cp", axis.activity, source)]
    return Pending(works, lambda: received, x)
