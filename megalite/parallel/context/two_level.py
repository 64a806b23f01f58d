"""Two levels of context parallelism (as in USP, Fang & Zhao 2024).

Ulysses is used among the ranks of a node, and a ring between nodes.

    inner    all-to-all from parts of all heads to the positions of the whole inner group with some of the
             heads, and back after attention
    outer    a ring over the ranks with the same heads, with the parts of the inner groups

The positions of an inner group are in ascending order if its ranks hold consecutive pieces of them
(`parts.split`). Hops between nodes only carry the keys and values of some of the heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megalite.mesh.mesh import MeshAxis
from megalite.parallel.context.options import part_options
from megalite.parallel.context.parts import SequencePart, grouped
from megalite.parallel.context.ring import Ring
from megalite.parallel.context.sinks import SomeSinks
from megalite.parallel.context.ulysses import summed, to_heads, to_positions


class _ToHeads(torch.autograd.Function):
    """q, k, v [seq/cp, batch, heads, dim] -> [seq/outer, batch, heads/inner, dim].

    Backward: the inverse, with the copies of a head summed.
    """

    @staticmethod
    def forward(ctx: Any, inner: MeshAxis, q: Tensor, k: Tensor, v: Tensor) -> Any:
        ctx.inner, ctx.kv_heads, repeats = inner, k.shape[2], max(inner.size // k.shape[2], 1)
        return tuple(to_heads((q, *(x.repeat_interleave(repeats, dim=2) for x in (k, v))), inner))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, Tensor, Tensor]:
        dq, dk, dv = to_positions(grads, ctx.inner)
        return None, dq, summed(dk, ctx.kv_heads), summed(dv, ctx.kv_heads)


class _ToPositions(torch.autograd.Function):
    """The output [seq/outer, batch, heads/inner, dim] -> [seq/cp, batch, heads, dim].

    Backward: the inverse.
    """

    @staticmethod
    def forward(ctx: Any, inner: MeshAxis, out: Tensor) -> Tensor:
        ctx.inner = inner
        return to_positions([out], inner)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, to_heads(grads, ctx.inner)[0]


def two_level(inner: MeshAxis, outer: MeshAxis) -> Callable[[Tensor, Tensor, Tensor, dict[str, Any]], Tensor]:
    """Return `attend` as described in `attend.attention_over`."""

    def attend(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        part: SequencePart = options["part"]
        segments, starts = grouped(tuple(part.segments), inner.size), part.document_start
        used = part_options(options)
        if starts is not None:
            used["document_start"] = torch.cat(
                [starts[segment.start : segment.stop] for segment in segments[outer.rank]]
            )
        if used["dropout"] is not None:
            first = used["dropout"].head_offset + q.shape[2] // inner.size * inner.rank
            used["dropout"] = replace(used["dropout"], head_offset=first)
        heads = _ToHeads.apply(inner, q, k, v)
        sinks = None if "sinks" not in options else SomeSinks(options["sinks"], inner)
        out: Tensor = Ring.apply(
            *heads, outer, SequencePart(segments, outer.rank, part.length, None), used, sinks
        )
        return _ToPositions.apply(inner, out)

    return attend
