"""Gathered attention (Llama 3, Grattafiori et al. 2024).

Every rank attends with its own queries to the keys and values of whole rows.

    forward    all-gather of k and v along the sequence
    backward   the same again, so that they are not kept, then reduce-scatter of dk and dv in at least fp32

Parts are zigzag, so that the ranks have the same amount of work; attention receives their positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megalite_kernels.attention_part import attention_part, attention_part_backward, delta
from torch import Tensor

from megalite.mesh.mesh import MeshAxis
from megalite.parallel.collectives import all_gather, reduce_scatter
from megalite.parallel.context.parts import PositionSegments, SequencePart
from megalite.parallel.context.sinks import Sinks, accumulate_gradient, with_sinks


def in_order(x: Tensor, parts: Sequence[PositionSegments]) -> Tensor:
    """Reorder [seq, …] from rank order to the order of positions."""
    lengths = [length for segments in parts for _, length in segments]
    pieces = zip((start for segments in parts for start, _ in segments), x.split(lengths), strict=True)
    return torch.cat([piece for _, piece in sorted(pieces, key=lambda piece: piece[0])])


def by_rank(x: Tensor, parts: Sequence[PositionSegments]) -> Tensor:
    """Reorder [seq, …] from the order of positions to rank order, the inverse of `in_order`."""
    return torch.cat([x[start : start + length] for segments in parts for start, length in segments])


class Gathered(torch.autograd.Function):
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
        keys, values = _whole(k, v, cp, part)
        out, lse = attention_part(q, keys, values, part.segments[part.rank], [(0, len(keys))], **options)
        out, lse = with_sinks(out, lse, sinks)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        cp, part, dout = ctx.cp, ctx.part, grads[0]
        keys, values = _whole(k, v, cp, part)
        places = part.segments[part.rank], [(0, len(keys))]
        inner = delta(dout, out)
        accumulate_gradient(ctx.sinks, lse, inner)
        dq, *dkv = attention_part_backward(dout, q, keys, values, lse, inner, *places, **ctx.options)
        del keys, values  # their gradients take the same amount
        dk, dv = (
            reduce_scatter(by_rank(torch.cat(dkv, dim=-1), part.segments), cp)
            .wait()
            .split((k.shape[-1], v.shape[-1]), dim=-1)
        )
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None


def whole(x: Tensor, cp: MeshAxis, part: SequencePart) -> Tensor:
    """Gather whole rows in the order of positions, over cp: [seq/cp, …] -> [seq, …]."""
    return in_order(all_gather(x, cp).wait(), part.segments)


def own_part(x: Tensor, part: SequencePart) -> Tensor:
    """Return this rank's part of whole rows: [seq, …] -> [seq/cp, …]."""
    return torch.cat([x[segment.start : segment.stop] for segment in part.segments[part.rank]])


def _whole(k: Tensor, v: Tensor, cp: MeshAxis, part: SequencePart) -> tuple[Tensor, Tensor]:
    """Gather keys and values of whole rows, [seq, batch, kv_heads, dim] each, in the order of positions."""
    keys, values = whole(torch.cat((k, v), dim=-1), cp, part).split((k.shape[-1], v.shape[-1]), dim=-1)
    return keys, values
