"""Ring attention (Liu et al. 2023).

Keys and values are passed from rank to rank, and each rank attends with its own queries to the part it
currently has.

    forward    cp − 1 hops of k and v
    backward   the same again, and cp − 1 hops of dk and dv in at least fp32

A hop runs while the current part is computed. Partial results are merged by their log-sum-exp, and gradients
are added, in at least fp32. Parts are zigzag, so that the ranks have the same amount of work at each hop; a
part that no query of a rank sees is passed on.

dk and dv of a part follow it one hop later: the owner of the part keeps its own contribution, the next rank
starts a sum, each further rank adds to it, and the last one, whose next rank is the owner, returns it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megalite_kernels.attention_part import attention_part, attention_part_backward, delta, merged
from torch import Tensor

from megalite.mesh.mesh import MeshAxis
from megalite.parallel.collectives import Pending, Work
from megalite.parallel.context.parts import PositionSegments, SequencePart, ring_order, sees
from megalite.parallel.context.sinks import Sinks, accumulate_gradient, with_sinks


def pass_on(x: Tensor, axis: MeshAxis) -> Pending:
    """Send x to the next rank of the ring, and receive a tensor of the same size from the previous one."""
    axis.traffic["hop", axis.name] += 1
    x, received = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    target, source = axis.ranks[(axis.rank + 1) % axis.size], axis.ranks[axis.rank - 1]
    send, receive = (
        partial(dist.isend, x, target, group=axis.group),
        partial(dist.irecv, received, source, group=axis.group),
    )
    if dist.get_backend(axis.group) == "gloo":
        works = [
            Work(send, "hop over cp", axis.activity, target, sends=x),
            Work(receive, "hop over cp", axis.activity, source, receives=received),
        ]
    # both in one batch, otherwise NCCL would finish the send before starting the receive, on every rank
    else:
        operations = [
            dist.P2POp(dist.isend, x, target, axis.group),
            dist.P2POp(dist.irecv, received, source, axis.group),
        ]
        # One work for the whole batch, as NCCL groups it.
        start = partial(lambda both: dist.batch_isend_irecv(both)[-1], operations)
        works = [Work(start, "hop over cp", axis.activity, source, (), x, received)]
    return Pending(works, lambda: received, x)


def _visits(
    k: Tensor, v: Tensor, cp: MeshAxis, part: SequencePart
) -> Iterator[tuple[PositionSegments, Tensor, Tensor]]:
    """Yield the positions, keys and values of each part that arrives, starting with this rank's own.

    The next part arrives while the current one is used.
    """
    here = torch.cat((k, v), dim=-1)  # [seq/cp, batch, kv_heads, both dims]
    for hop, owner in enumerate(ring_order(cp.rank, cp.size)):
        pending = pass_on(here, cp) if hop < cp.size - 1 else None
        keys, values = here.split((k.shape[-1], v.shape[-1]), dim=-1)
        yield part.segments[owner], keys, values
        if pending is not None:
            here = pending.wait()


class Ring(torch.autograd.Function):
    """Attention of parts of rows.

    q is [seq/cp, batch, heads, dim], k and v contain this tp rank's key-value heads, and the result has the
    shape of q.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cp: MeshAxis,
        part: SequencePart,
        options: dict[str, Any],
        sinks: Sinks | None,
    ) -> Tensor:
        ctx.cp, ctx.part, ctx.options, ctx.sinks = cp, part, options, sinks
        own = part.segments[part.rank]
        out, lse = merged(  # first of this rank's own part, which each query sees some of
            attention_part(q, keys, values, own, segments, **options)
            for segments, keys, values in _visits(k, v, cp, part)
            if sees(own, segments, options["window"])
        )
        out, lse = with_sinks(out, lse, sinks)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        cp, part, dout, options = ctx.cp, ctx.part, grads[0], ctx.options
        own, inner = part.segments[part.rank], delta(dout, out)
        accumulate_gradient(ctx.sinks, lse, inner)
        dq = torch.zeros_like(q, dtype=inner.dtype)
        both = (*k.shape[:3], k.shape[-1] + v.shape[-1])
        # dk and dv of this rank's part from its own queries
        home = torch.zeros(both, dtype=inner.dtype, device=k.device)
        # dk and dv of the part that is here from the ranks before, one hop behind it
        travelling: Pending | None = None
        for hop, (segments, keys, values) in enumerate(_visits(k, v, cp, part)):
            dkv = home if hop == 0 else torch.zeros_like(home)
            if sees(own, segments, options["window"]):
                dq_part, *dkv_part = attention_part_backward(
                    dout, q, keys, values, lse, inner, own, segments, **options
                )
                dq += dq_part
                dkv += torch.cat(dkv_part, dim=-1)
            if travelling is not None:
                dkv += travelling.wait()
            if hop > 0:
                travelling = pass_on(dkv, cp)
        assert travelling is not None
        dk, dv = (home + travelling.wait()).split((k.shape[-1], v.shape[-1]), dim=-1)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None
