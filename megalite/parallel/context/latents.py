"""Latent attention over parts of rows, which exchanges latents instead of keys and values.

Each rank computes the keys and values of its heads from the latents of all tokens.

    forward    all-gather of latents and shared keys over cp. With sequence parallelism each tp rank has a
               part of the positions, and they are then also gathered over tp.
    backward   the same again, so that neither latents nor keys and values are kept, and keys and values are
               recomputed; then the gradients are summed. With sequence parallelism: reduce-scatter over tp in
               the compute dtype, then reduce-scatter over cp in at least fp32. Without: reduce-scatter over
               cp first, then all-reduce of this rank's part over tp.

Each rank computes the gradients of the keys and values of whole rows from its own queries and heads. The
gradient of a latent is therefore a sum over cp and tp. The gradient of the weights that expand latents is a
sum over cp, which is part of the sum of all weight gradients over data = dp · cp.

gather computes keys and values of whole rows at once. ring computes them for one rank's part at a time and
merges the results as in `ring`. It needs no hops, because the latents of whole rows take less memory than the
keys and values of one part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from megalite_kernels.attention_part import attention_part, attention_part_backward, delta, merged
from torch import Tensor

from megalite.mesh.mesh import MeshAxis
from megalite.parallel.collectives import all_gather, all_reduce, reduce_scatter
from megalite.parallel.context.gathered import by_rank, in_order
from megalite.parallel.context.options import part_options
from megalite.parallel.context.parts import PositionSegment, PositionSegments, SequencePart, ring_order, sees
from megalite.parallel.weight import Weight

Expand = Callable[[Tensor, Tensor, PositionSegments], tuple[Tensor, Tensor]]
"""(latents, shared keys, their positions) -> keys and values of this tp rank's heads.

Latents are [seq, batch, rank], shared keys [seq, batch, dim].
"""


@dataclass(frozen=True)
class Spread:
    """Gathers narrow values of whole rows. All cp ranks have the same number of positions.

    Attributes:
        tp: the ranks that each compute a part of the gradient.
        split: whether tp ranks hold consecutive pieces of their cp rank's positions (sequence parallelism).
    """

    cp: MeshAxis
    tp: MeshAxis
    split: bool

    def spread(self, own: Tensor) -> Tensor:
        """Gather the parts in the order of cp ranks: [seq/cp (/tp), batch, width] -> [seq, batch, width]."""
        parts = all_gather(own, self.cp).wait()
        if not self.split:
            return parts
        pieces = all_gather(parts, self.tp).wait().unflatten(0, (self.tp.size, self.cp.size, -1))
        return pieces.transpose(0, 1).flatten(0, 2)

    def collect(self, grad: Tensor) -> Tensor:
        """Sum a gradient over both axes and return this rank's part, the inverse of `spread`."""
        accumulate_dtype = torch.promote_types(grad.dtype, torch.float32)
        if not self.split:
            summed = reduce_scatter(grad.to(accumulate_dtype), self.cp).wait().to(grad.dtype)
            return all_reduce(summed, self.tp, disposable=True).wait()
        pieces = grad.unflatten(0, (self.cp.size, self.tp.size, -1)).transpose(0, 1).flatten(0, 2)
        return (
            reduce_scatter(reduce_scatter(pieces, self.tp).wait().to(accumulate_dtype), self.cp)
            .wait()
            .to(grad.dtype)
        )


@dataclass(frozen=True)
class Latents(Spread):
    """Communication of latents and shared keys.

    Attributes:
        by_part: whether keys and values are computed for one rank's part at a time, if the gradient of their
            weight allows it.
        weight: the weight that expands latents.
    """

    by_part: bool
    weight: Weight

    @property
    def at_once(self) -> bool:
        """Return whether keys and values of whole rows are computed in a single matmul.

        Their weights then receive one gradient contribution. A W pass requires the operands of the matmuls of
        all parts in any case.
        """
        return not self.by_part or self.weight.deferred or self.weight.adapter is not None

    def as_one(self) -> AbstractContextManager[None]:
        """Context manager that counts the weight gradients of several parts as one contribution."""
        return nullcontext() if self.at_once else self.weight.accumulate_as_one()


class _LatentPiece(NamedTuple):
    """Positions whose keys and values exist at the same time, of one cp rank or of whole rows."""

    rank: int | None
    segments: PositionSegments
    both: Tensor  # [seq, batch, latent and shared key]


class _Rows:
    """Latents and shared keys of whole rows, and the sum of their gradients."""

    def __init__(self, way: Latents, latent: Tensor, key: Tensor, part: SequencePart, window: int | None):
        self.way, self.part, self.window, self.widths = way, part, window, (latent.shape[-1], key.shape[-1])
        self.spread = way.spread(torch.cat((latent, key), dim=-1))

    def pieces(self) -> Iterator[_LatentPiece]:
        """Yield the pieces that are visible to the queries of this rank, its own part first.

        Each query sees some positions of the rank's own part.
        """
        parts = self.part.segments
        if self.way.at_once:
            yield _LatentPiece(None, (PositionSegment(0, len(self.spread)),), in_order(self.spread, parts))
            return
        each = self.spread.unflatten(0, (len(parts), -1))
        for rank in ring_order(self.part.rank, len(parts)):
            if sees(parts[self.part.rank], parts[rank], self.window):
                yield _LatentPiece(rank, parts[rank], each[rank])

    def inputs(self, piece: _LatentPiece) -> tuple[Tensor, Tensor]:
        latent, key = (x.contiguous() for x in piece.both.split(self.widths, dim=-1))
        return latent, key

    def collected(self, gradients: list[tuple[_LatentPiece, Tensor]]) -> tuple[Tensor, Tensor]:
        """Compute the gradients of this rank's latents and shared keys from those of the pieces."""
        total = torch.zeros_like(self.spread)
        for piece, grad in gradients:
            if piece.rank is None:
                total = by_rank(grad, self.part.segments)
            else:
                total.unflatten(0, (len(self.part.segments), -1))[piece.rank] = grad
        latent, key = self.way.collect(total).split(self.widths, dim=-1)
        return latent, key


class Expanded(torch.autograd.Function):
    """Attention to whole rows, given latents and rotated shared keys of this rank's positions.

    q is [seq/cp, batch, heads, dim], latents and shared keys are [seq/cp (/tp), batch, width], and the result
    is [seq/cp, batch, heads, value dim].
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        latent: Tensor,
        key: Tensor,
        way: Latents,
        part: SequencePart,
        options: dict[str, Any],
        expand: Expand,
    ) -> Tensor:
        ctx.way, ctx.part, ctx.options, ctx.expand = way, part, options, expand
        rows = _Rows(way, latent, key, part, options["window"])
        own = part.segments[part.rank]
        out, lse = merged(
            attention_part(q, *expand(*rows.inputs(piece), piece.segments), own, piece.segments, **options)
            for piece in rows.pieces()
        )
        out = out.to(q.dtype)
        ctx.save_for_backward(q, latent, key, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None, None]:
        q, latent, key, out, lse = ctx.saved_tensors
        way, part, dout = ctx.way, ctx.part, grads[0]
        rows, inner = _Rows(way, latent, key, part, ctx.options["window"]), delta(dout, out)
        dq = torch.zeros_like(q, dtype=inner.dtype)
        gradients: list[tuple[_LatentPiece, Tensor]] = []
        with way.as_one():
            for piece in rows.pieces():
                # leaves: the inner backward ends here
                inputs = [x.detach().requires_grad_() for x in rows.inputs(piece)]
                with torch.enable_grad():  # disabled inside a backward
                    k, v = ctx.expand(*inputs, piece.segments)
                places = part.segments[part.rank], piece.segments
                dq_part, dk, dv = attention_part_backward(
                    dout, q, k.detach(), v.detach(), lse, inner, *places, **ctx.options
                )
                dq += dq_part
                # this accumulates the gradient of the weight
                its = torch.autograd.grad((k, v), inputs, (dk.to(k.dtype), dv.to(v.dtype)))
                gradients.append((piece, torch.cat(its, dim=-1)))
        dlatent, dkey = rows.collected(gradients)
        return dq.to(q.dtype), dlatent, dkey, None, None, None, None


def expanding(way: Latents) -> Callable[[Tensor, Tensor, Tensor, dict[str, Any]], Tensor]:
    """Return attend(q, latent, key, options), with latents and shared keys instead of keys and values.

    It is otherwise as described in `attend.attention_over`. The options also contain `expand`.
    """

    def attend(q: Tensor, latent: Tensor, key: Tensor, options: dict[str, Any]) -> Tensor:
        part, expand = options["part"], options["expand"]
        out: Tensor = Expanded.apply(q, latent, key, way, part, part_options(options), expand)
        return out

    return attend
