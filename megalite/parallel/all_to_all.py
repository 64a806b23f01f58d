"""All-to-all of uneven sizes over a mesh axis: every rank sends a part of one flat tensor to each other rank.

In a file of its own, imported where it is used: few runs need it. On NCCL it is torch.distributed's. On gloo,
which lacks it, each rank exchanges directly with every rank to or from which anything goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch.distributed as dist
from torch import Tensor

from megalite.mesh.mesh import MeshAxis
from megalite.parallel.collectives import Pending, Work, group_work


def all_to_all(x: Tensor, sizes: Sequence[int], received: Sequence[int], axis: MeshAxis) -> Pending:
    """The parts that the ranks send to this one, concatenated in rank order: a new flat tensor.

    Args:
        x: [sum of sizes], the parts for the ranks, in rank order.
        sizes, received: elements that go to, and come from, each rank of the axis; nothing from a rank to
        itself. Every rank of the axis
            calls this, also one that takes no part.
    """
    axis.traffic["all_to_all", axis.name] += 1
    result = x.new_empty(sum(received))
    if dist.get_backend(axis.group) != "gloo":
        start = partial(
            dist.all_to_all_single, result, x, list(received), list(sizes), group=axis.group, async_op=True
        )
        return Pending([group_work(start, "all_to_all", axis)], lambda: result, x)
    outgoing, incoming, works = x.split(list(sizes)), result.split(list(received)), []
    # each rank starts with its own neighbour, so that no rank is the first target of all
    for step in range(1, axis.size):
        source, target = (axis.rank - step) % axis.size, (axis.rank + step) % axis.size
        for operation, part, peer in (
            (dist.irecv, incoming[source], source),
            (dist.isend, outgoing[target], target),
        ):
            if part.numel():
                start = partial(operation, part, axis.ranks[peer], group=axis.group)
                works.append(Work(start, f"all_to_all over {axis.name}", axis.activity, axis.ranks[peer]))
    return Pending(works, lambda: result, x)
