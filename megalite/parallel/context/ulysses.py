"""Ulysses (DeepSpeed-Ulysses, Jacobs et al. 2023).

Ranks exchange parts of all heads for whole rows of some heads, and attend in the same way as a single
process.

    forward    all-to-all of q, k and v [seq/cp, batch, heads] -> [seq, batch, heads/cp]; of the output, back
    backward   all-to-all of dout; of dq, dk and dv, back

Documents, windows, soft-cap and dropout work without changes, and so do the attention kernels. If there are
fewer key-value heads than cp ranks, each head is sent to several ranks, and their gradients are summed on the
way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from megalite_kernels.attention import attention, attention_backward
from megalite_kernels.attention_sinks import attention_with_sinks, attention_with_sinks_backward
from torch import Tensor

from megalite.mesh.mesh import MeshAxis
from megalite.parallel.all_to_all import all_to_all
from megalite.parallel.context.parts import SequencePart
from megalite.parallel.context.sinks import Sinks


def to_heads(tensors: Sequence[Tensor], cp: MeshAxis) -> list[Tensor]:
    """Exchange parts for heads in one all-to-all: [seq/cp, batch, heads, dim] -> [seq, batch, heads/cp, dim].

    The number of heads of each tensor must be divisible by cp.
    """
    length, batch = tensors[0].shape[:2]
    widths = [x.shape[2] // cp.size * x.shape[3] for x in tensors]
    packed = tensors[0].new_empty(cp.size, length, batch, sum(widths))  # the receiving rank first
    for part, x in zip(packed.split(widths, dim=3), tensors, strict=True):
        part.unflatten(3, (-1, x.shape[3])).copy_(x.unflatten(2, (cp.size, -1)).movedim(2, 0))
    # the sending rank first, in the order of positions
    received = all_to_all(packed, cp).wait()
    parts = zip(received.flatten(0, 1).split(widths, dim=2), tensors, strict=True)
    return [part.unflatten(2, (-1, x.shape[3])) for part, x in parts]


def to_positions(tensors: Sequence[Tensor], cp: MeshAxis) -> list[Tensor]:
    """Exchange heads for parts, the inverse of `to_heads`."""
    # [cp, seq/cp, batch, heads/cp · dim]
    packed = torch.cat([x.flatten(2) for x in tensors], dim=2).unflatten(0, (cp.size, -1))
    # the sending rank first, in the order of heads
    received = all_to_all(packed, cp).wait()
    parts = received.split([x.shape[2] * x.shape[3] for x in tensors], dim=3)
    return [
        part.unflatten(3, x.shape[2:]).movedim(0, 2).flatten(2, 3)
        for part, x in zip(parts, tensors, strict=True)
    ]


class Ulysses(torch.autograd.Function):
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
        ctx.cp, ctx.kv_heads, repeats = cp, k.shape[2], max(cp.size // k.shape[2], 1)
        if options["dropout"] is not None:
            first = options["dropout"].head_offset + q.shape[2] // cp.size * cp.rank
            options = {**options, "dropout": replace(options["dropout"], head_offset=first)}
        ctx.options = {**options, "document_start": part.document_start}
        # [seq, batch, heads/cp, dim] each
        own = to_heads((q, *(x.repeat_interleave(repeats, dim=2) for x in (k, v))), cp)
        ctx.sinks = sinks
        if sinks is None:
            out, saved = attention(*own, **ctx.options)
        else:
            out, lse = attention_with_sinks(own[0], own[1], own[2], sinks.tensor, **ctx.options)
            saved = (lse,)
        ctx.save_for_backward(*own, out, *saved)
        return to_positions([out], cp)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None, None]:
        q, k, v, out, *saved = ctx.saved_tensors
        (dout,) = to_heads(grads[:1], ctx.cp)
        if ctx.sinks is None:
            dqkv: Sequence[Tensor] = attention_backward(dout, q, k, v, out, tuple(saved), **ctx.options)
        else:
            *dqkv, dsinks = attention_with_sinks_backward(
                dout, q, k, v, out, saved[0], ctx.sinks.tensor, **ctx.options
            )
            ctx.sinks.accumulate(dsinks)
        dq, dk, dv = to_positions(dqkv, ctx.cp)
        return dq, summed(dk, ctx.kv_heads), summed(dv, ctx.kv_heads), None, None, None, None


def summed(grad: Tensor, kv_heads: int) -> Tensor:
    """Sum the gradient of each key-value head over the ranks that received it, in at least fp32."""
    if grad.shape[2] == kv_heads:
        return grad
    return (
        grad.unflatten(2, (kv_heads, -1))
        .sum(3, dtype=torch.promote_types(grad.dtype, torch.float32))
        .to(grad.dtype)
    )
