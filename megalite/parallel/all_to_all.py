"""All-to-all over a mesh axis: every rank sends a part of its tensor to every rank.

NCCL uses torch.distributed's implementation. On gloo, which does not support it, each rank exchanges its
non-empty parts directly with the other ranks. `axis.traffic` counts the calls.
"""

from __future__ import annotations

from functools import partial

import torch.distributed as dist
from torch import Tensor

from megalite.mesh.mesh import MeshAxis
from megalite.parallel.collectives import Pending, exchange, group_work


def all_to_all(
    x: Tensor, axis: MeshAxis, send: list[int] | None = None, receive: list[int] | None = None
) -> Pending:
    """Return the parts that the ranks send to this one, concatenated along dim 0 in rank order.

    Every rank of the axis calls this, even if it sends and receives nothing.

    Args:
        x: the parts for the ranks, concatenated along dim 0 in rank order.
        send, receive: lengths along dim 0 of the part for, and from, each rank. None: equal parts.
    """
    if axis.size == 1:
        return Pending([], lambda: x)
    axis.traffic["all_to_all", axis.name] += 1
    x = x.contiguous()
    out = x.new_empty((len(x) if receive is None else sum(receive), *x.shape[1:]))
    if dist.get_backend(axis.group) != "gloo":
        start = partial(dist.all_to_all_single, out, x, receive, send, group=axis.group, async_op=True)
        return Pending([group_work(start, "all_to_all", axis, x, out)], lambda: out, x)
    equal = [len(x) // axis.size] * axis.size
    outgoing, incoming = list(x.split(send or equal)), list(out.split(receive or equal))
    works = exchange(outgoing, incoming, axis, "all_to_all")
    incoming[axis.rank].copy_(outgoing[axis.rank])
    return Pending(works, lambda: out, x)
