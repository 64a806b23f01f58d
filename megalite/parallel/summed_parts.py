"""Reduce-scatter on NCCL that adds in rank order in fp32, on a separate stream.

Communication: an all-to-all in the dtype of the values that are sent.
"""

from __future__ import annotations

from functools import cache, partial

import torch
import torch.distributed as dist
from megalite_kernels.ordered_sum import ordered_sum
from torch import Tensor

from megalite.mesh.mesh import MeshAxis
from megalite.parallel.collectives import Pending, group_work


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of a device's sums, which are executed in order, as are their collectives."""
    return torch.cuda.Stream(device)


def summed_parts(x: Tensor, axis: MeshAxis, dtype: torch.dtype) -> Pending:
    """Compute this rank's part (along dim 0) of the sum of x over the axis, in `dtype`.

    On a GPU a separate stream waits for the collective and adds, while the computation continues; it only
    waits for the sum in `wait`. All memory is allocated on the stream of the computation and held until then,
    so that it cannot be reused too early.
    """
    received = torch.empty_like(x)
    total = x.new_empty((x.shape[0] // axis.size, *x.shape[1:]), dtype=dtype)
    start = partial(dist.all_to_all_single, received, x, group=axis.group, async_op=True)
    work = group_work(start, "all_to_all", axis, x, received)

    def add() -> Tensor:
        ordered_sum(received.view(axis.size, -1), total.view(-1))
        return total

    if not x.is_cuda:
        return Pending([work], add, x)
    stream = _stream(x.device)
    # the memory of `total` may just have been freed there
    stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(stream):
        work.wait()
        add()
        done = stream.record_event()

    def result() -> Tensor:
        torch.cuda.current_stream(x.device).wait_event(done)
        return total

    return Pending([], result, (x, received))
