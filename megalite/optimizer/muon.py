"""Muon (Jordan et al. 2024) for the matrices of the layers, AdamW for all other tensors, over the owned ranges of flat buckets.

    m ← lerp(m, g, 1 − momentum)        u ← lerp(g, m, momentum) with nesterov, else m
    p ← p · (1 − lr · weight_decay) − lr · adjust · orthogonalized(u)

The elementwise part runs on each rank's ranges. Every matrix is orthogonalised whole, however it is sharded:

    round k     u of up to one matrix for each rank travels to the matrices' owners (`matrix_owners`): one all-to-all over the stage
                Newton-Schulz iterations at the owner, while the u of round k + 1 travels
                the results travel to the ranks that keep state of the matrices: one all-to-all, overlapped with the next round's iterations
                p

Both directions carry the dtype of the iterations, `muon.ns_dtype`: with bf16 the first operation on u would round it anyway, so the bits
do not depend on who is the owner. On one rank nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megalite.config.optimizers import MuonConfig, OptimizerConfig
from megalite.optimizer.adamw import AdamW
from megalite.optimizer.matrix_exchange import Round
from megalite.optimizer.matrix_owners import Matrix, Piece, matrix_rounds
from megalite.optimizer.newton_schulz import lr_factor, orthogonalized
from megalite.optimizer.table import MUON, StateSpan, state_kinds, state_spans
from megalite.parallel.sharding.bucket_buffers import BucketBuffers
from megalite.parallel.sharding.offload import StateRange
from megalite.parallel.sharding.store import ParameterStore
from megalite.parallel.spec import FlatRectangle, Rectangle, Segment


@dataclass(frozen=True)
class _Span:
    """State of a range of a bucket: one tensor for each of its kinds."""

    place: StateSpan
    state: tuple[Tensor, ...]

    def rectangles(self, flat: FlatRectangle, offset: int) -> Iterator[Rectangle]:
        """The parts of the state that `flat`, of the stored tensor at `offset` of the bucket, describes."""
        own = slice(offset + flat.start - self.place.start, offset + flat.stop - self.place.start)
        for kind, values in zip(self.place.kinds, self.state, strict=True):
            yield Rectangle(f"{kind}/{flat.segment.name}", flat.segment.shape, flat.offsets, values[own].view(flat.sizes))


@dataclass(frozen=True)
class _Piece:
    """This rank's elements of a matrix: flat views of the bucket's memory and of the state."""

    grads: Tensor
    moment: Tensor
    master: Tensor
    weights: Tensor | None  # in compute precision; None: the masters are the weights
    factor: float  # of the learning rate


class Muon(AdamW):
    """The optimizer state of one rank: one moment of the elements of matrices, AdamW's two of all others.

    Args:
        options: AdamW's, and the schedule of the learning rate.
        muon: those of the matrices.

    Raises:
        ValueError: the mesh has no axis over the several ranks of a stage.
    """

    def __init__(self, store: ParameterStore, options: OptimizerConfig, muon: MuonConfig):
        self.store, self.options, self.muon = store, options, muon
        trained = [bucket for bucket in store.buckets if bucket.layout.trainable]
        self._spans = {bucket: list(self._allocate(bucket)) for bucket in trained}
        self._ranges = [each for bucket in trained for each in self._adamw_ranges(bucket)]
        self._dtype = torch.bfloat16 if muon.ns_dtype == "bf16" else store.buckets[0].master.dtype  # at least fp32
        like, mesh = torch.empty(0, dtype=self._dtype, device=store.device), store.mesh
        if mesh.stage is None and mesh.dims.stage_ranks > 1:
            raise ValueError("Muon exchanges parts of matrices over a stage: create the mesh with stage_axis=True")
        rounds = matrix_rounds([bucket.layout for bucket in store.buckets], mesh.dims)
        self._rounds = [Round(each, mesh.stage, like) for each in rounds]
        self._pieces = {each: [self._piece(*kept) for kept in each.kept] for each in self._rounds}

    def _allocate(self, bucket: BucketBuffers) -> Iterator[_Span]:
        for span in state_spans(bucket.layout, bucket.start, bucket.stop, "muon"):
            zeros = (self.store.state.zeros(span.stop - span.start, bucket.master.dtype) for _ in span.kinds)
            yield _Span(span, tuple(zeros))

    def _adamw_ranges(self, bucket: BucketBuffers) -> Iterator[StateRange]:
        for span in self._spans[bucket]:
            if span.place.kinds != MUON:
                own = slice(span.place.start - bucket.start, span.place.stop - bucket.start)
                yield StateRange(span.place.decays, bucket.owned_weights[own], bucket.owned_grads[own], bucket.master[own], span.state)

    def _piece(self, matrix: Matrix, piece: Piece) -> _Piece:
        bucket = self.store.buckets[matrix.bucket]
        own, span = slice(piece.start - bucket.start, piece.stop - bucket.start), self._span(bucket, piece.start)
        return _Piece(
            bucket.owned_grads[own],
            span.state[0][piece.start - span.place.start : piece.stop - span.place.start],
            bucket.master[own],
            bucket.owned_weights[own] if bucket.has_own_master else None,
            lr_factor(matrix.segment.shape, self.muon.adjust_lr),
        )

    def _span(self, bucket: BucketBuffers, at: int) -> _Span:
        return next(span for span in self._spans[bucket] if span.place.start <= at < span.place.stop)

    def state_kinds(self, segment: Segment) -> tuple[str, ...]:
        """One moment of a matrix, two of any other trainable segment."""
        return state_kinds(segment, "muon")

    @torch.no_grad()
    def step(self, step: int, lr: float, divisor: Tensor | None) -> None:
        """As the interface says, and collective over the ranks of a stage. Matrices have a rate in the proportion of `lr` to its peak."""
        super().step(step, lr, divisor)
        rate = self.muon.lr * (lr / self.options.lr)
        scale = None if divisor is None else divisor.to(self.store.state.device, torch.float32, non_blocking=True)
        gathered: list[Callable[[], Tensor | None]] = [each.gather(self._mixed(each, scale)) for each in self._rounds[:1]]
        update: Callable[[], None] = _nothing
        for number, each in enumerate(self._rounds):
            matrix = gathered.pop()()
            for following in self._rounds[number + 1 : number + 2]:  # travels while the matrix is orthogonalised
                gathered.append(following.gather(self._mixed(following, scale)))
            scattered = each.scatter(None if matrix is None else orthogonalized(matrix, self.muon.ns_steps))
            update()  # of the round before
            update = partial(self._update, each, scattered, rate, scale)
        update()

    def _mixed(self, each: Round, scale: Tensor | None) -> list[Tensor]:
        """Update the moments of this rank's pieces of a round. Returns what is orthogonalised, in the dtype of the iterations."""
        momentum, found = self.muon.momentum, []
        for piece in self._pieces[each]:
            grads, moment = piece.grads.to(piece.moment.dtype), piece.moment
            if scale is None:
                moment.lerp_(grads, 1 - momentum)
            else:
                grads = grads / scale
                moment.copy_(torch.where(scale.isnan(), moment, moment.lerp(grads, 1 - momentum)))
            found.append((grads.lerp(moment, momentum) if self.muon.nesterov else moment).to(self._dtype))
        return found

    def _update(self, each: Round, scattered: Callable[[], list[Tensor]], rate: float, scale: Tensor | None) -> None:
        """Update the master weights of this rank's pieces of a round, and its weights from them."""
        for piece, result in zip(self._pieces[each], scattered(), strict=True):
            new = piece.master if scale is None else piece.master.clone()
            new.mul_(1 - rate * self.muon.weight_decay).add_(result, alpha=-rate * piece.factor)
            if scale is not None:
                piece.master.copy_(torch.where(scale.isnan(), piece.master, new))
            if piece.weights is not None:
                piece.weights.copy_(piece.master, non_blocking=True)

    def changing(self) -> list[Tensor]:
        """All tensors that a step changes: master weights and moments."""
        moments = [each for spans in self._spans.values() for span in spans for each in span.state]
        return [*(bucket.master for bucket in self._spans), *moments]

    def to_save(self, kinds: Sequence[str] | None = None) -> list[Rectangle]:
        """This rank's part of a checkpoint: over all ranks, each element of weights and moments exactly once."""
        found = [each for bucket, flat, offset in self.store.owned_rectangles() for each in self._rectangles(bucket, flat, offset)]
        return [each for each in found if kinds is None or each.name.partition("/")[0] in kinds]

    def to_load(self) -> list[Rectangle]:
        """Everything on this rank that a checkpoint must fill, tied copies and replicas included."""
        return [
            each
            for bucket in self.store.buckets
            for flat, offset in self.store.rectangles_in(bucket, bucket.start, bucket.stop)
            for each in self._rectangles(bucket, flat, offset)
        ]

    def _rectangles(self, bucket: BucketBuffers, flat: FlatRectangle, offset: int) -> Iterator[Rectangle]:
        yield bucket.rectangle("weight", bucket.master, flat, offset)
        if bucket in self._spans:  # a frozen bucket has no state
            yield from self._span(bucket, offset + flat.start).rectangles(flat, offset)


def _nothing() -> None:
    """The update before the first round."""
