"""Attention to selected rows, of whole rows or of a context-parallel rank's part of them.

    gather     latents of whole rows are gathered, from which each rank computes keys and values
               (`parallel.context.latents`); in backward again, then their gradients are summed
    ulysses    heads are exchanged for positions (`parallel.context.ulysses`), and selections are gathered;
               the probabilities of other heads are summed by a reduce-scatter

A selection has row indices: positions in the row, in which every rank has the keys and values. Ring is not
supported: latents are narrow, so that gather sends them once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from megalite_kernels import sparse_attention
from torch import Tensor

from megalite.mesh.mesh import MeshAxis
from megalite.parallel.collectives import all_gather, reduce_scatter
from megalite.parallel.context.gathered import by_rank, in_order, own_part, whole
from megalite.parallel.context.latents import Expand, Latents
from megalite.parallel.context.parts import PositionSegment, PositionSegments, SequencePart
from megalite.parallel.context.ulysses import to_heads, to_positions

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, dict[str, Any]], tuple[Tensor, ...]]
"""(q, k, v, selection, options) -> the output, and with `options["measured"]` the probabilities of this tp
rank's heads, summed, of this cp rank's queries: [seq/cp, batch, top]. Selections: of `Selections.gather`."""


class WholeLatents(NamedTuple):
    """How the keys and values of whole rows are computed from this rank's latents."""

    way: Latents
    part: SequencePart
    expand: Expand


class _WholeRows(torch.autograd.Function):
    """Attention to selected rows; q, k and v are [seq, batch, heads, dim]. No communication."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, selection: Tensor, scale: float, measured: bool
    ) -> Any:
        ctx.scale = scale
        out, lse = sparse_attention.forward(q, k, v, selection, scale)
        ctx.save_for_backward(q, k, v, out, lse, selection)
        return _with_probabilities(ctx, out, q, k, selection, lse, scale, measured)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, selection = ctx.saved_tensors
        dq, dk, dv = sparse_attention.backward(grads[0], q, k, v, out, lse, selection, ctx.scale)
        assert dv is not None
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None, None


class _OfLatents(torch.autograd.Function):
    """The same with latents and rotated shared keys of this rank's tokens, [seq/cp (/tp), batch, width]."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        latent: Tensor,
        key: Tensor,
        selection: Tensor,
        scale: float,
        measured: bool,
        rows: WholeLatents,
    ) -> Any:
        ctx.scale, ctx.rows = scale, rows
        way, part, expand = rows
        k, v = expand(*whole_latents(way, latent, key, part), row_segments(part))
        out, lse = sparse_attention.forward(q, k, v, selection, scale)
        ctx.save_for_backward(q, latent, key, out, lse, selection)
        return _with_probabilities(ctx, out, q, k, selection, lse, scale, measured)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, latent, key, out, lse, selection = ctx.saved_tensors
        way, part, expand = ctx.rows
        whole_rows = whole_latents(way, latent, key, part)
        inputs = [x.detach().requires_grad_() for x in whole_rows]  # leaves: the inner backward ends here
        with torch.enable_grad():  # disabled inside a backward
            k, v = expand(*inputs, row_segments(part))
        dq, dk, dv = sparse_attention.backward(
            grads[0], q, k.detach(), v.detach(), out, lse, selection, ctx.scale
        )
        assert dv is not None
        # this accumulates the gradient of the weight
        own = torch.autograd.grad((k, v), inputs, (dk.to(k.dtype), dv.to(v.dtype)))
        total = way.collect(by_rank(torch.cat(own, -1), part.segments))
        dlatent, dkey = total.split((latent.shape[-1], key.shape[-1]), -1)
        return dq, dlatent, dkey, None, None, None, None


class _Ulysses(torch.autograd.Function):
    """The same with keys and values of this rank's positions, which are exchanged for heads."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        selection: Tensor,
        scale: float,
        measured: bool,
        cp: MeshAxis,
        part: SequencePart,
    ) -> Any:
        ctx.scale, ctx.cp = scale, cp
        q, k, v = to_heads((q, k, v), cp)  # [seq, batch, heads/cp, dim]
        out, lse = sparse_attention.forward(q, k, v, selection, scale)
        ctx.save_for_backward(q, k, v, out, lse, selection)
        (own,) = to_positions([out], cp)
        if not measured:
            return (own,)
        probabilities = sparse_attention.probabilities(q, k, selection, lse, scale)
        probabilities = reduce_scatter(by_rank(probabilities, part.segments), cp).wait()
        ctx.mark_non_differentiable(probabilities)
        return own, probabilities

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, selection = ctx.saved_tensors
        (dout,) = to_heads(grads[:1], ctx.cp)
        dq, dk, dv = sparse_attention.backward(dout, q, k, v, out, lse, selection, ctx.scale)
        assert dv is not None
        dq, dk, dv = to_positions([dq, dk.to(k.dtype), dv.to(v.dtype)], ctx.cp)
        return dq, dk, dv, None, None, None, None, None


def _with_probabilities(
    ctx: Any,
    out: Tensor,
    q: Tensor,
    k: Tensor,
    selection: Tensor,
    lse: Tensor,
    scale: float,
    measured: bool,
) -> tuple[Tensor, ...]:
    if not measured:
        return (out,)
    probabilities = sparse_attention.probabilities(q, k, selection, lse, scale)
    ctx.mark_non_differentiable(probabilities)
    return out, probabilities


def row_segments(part: SequencePart) -> PositionSegments:
    """Return the positions of whole, padded rows."""
    return (PositionSegment(0, sum(segment.length for each in part.segments for segment in each)),)


def whole_latents(way: Latents, latent: Tensor, key: Tensor, part: SequencePart) -> tuple[Tensor, Tensor]:
    """Gather latents and shared keys of whole rows in the order of positions, [seq, batch, width] each."""
    rows = in_order(way.spread(torch.cat((latent, key), -1)), part.segments)
    latents, keys = (x.contiguous() for x in rows.split((latent.shape[-1], key.shape[-1]), -1))
    return latents, keys


def attention_to_selections(cp: MeshAxis, way: Latents | None) -> Attend:
    """Return the operation of a layout; `way` is that of latents, if these travel over cp."""

    def attend(
        q: Tensor, k: Tensor, v: Tensor, selection: Tensor, options: dict[str, Any]
    ) -> tuple[Tensor, ...]:
        further: tuple[Any, ...] = ()
        function: Any = _WholeRows
        if way is not None:
            function, further = _OfLatents, (WholeLatents(way, options["part"], options["expand"]),)
        elif cp.size > 1:
            function, further = _Ulysses, (cp, options["part"])
        out: tuple[Tensor, ...] = function.apply(
            q, k, v, selection, options["scale"], options["measured"], *further
        )
        return out

    return attend


@dataclass(frozen=True)
class Selections:
    """Communication of selections, from the ranks that score queries to those that attend with them.

    Attributes:
        split: whether tp ranks score different queries (sequence parallelism).
        whole: whether a rank attends with the queries of whole rows (Ulysses).
    """

    cp: MeshAxis
    tp: MeshAxis
    split: bool
    whole: bool

    def gather(self, own: Tensor, part: SequencePart | None) -> Tensor:
        """Return selections of all queries that this rank attends with.

        [seq/cp (/tp), batch, top] of own queries -> [seq/cp, batch, top], or of whole rows [seq, batch, top].
        """
        rows = all_gather(own, self.tp).wait() if self.split else own
        return whole(rows, self.cp, part) if self.whole and part is not None else rows

    def own(self, rows: Tensor, part: SequencePart | None) -> Tensor:
        """Return those of own queries, the inverse of `gather`."""
        if self.whole and part is not None:
            rows = own_part(rows, part)
        if not self.split:
            return rows
        length = len(rows) // self.tp.size
        return rows.narrow(0, length * self.tp.rank, length)
