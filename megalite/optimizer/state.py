"""Sharded optimizer state.

It consists of flat tensors over this rank's owned ranges of the buckets, next to the store's master weights.

    bucket of a rank   [ q k v o gate up down | norms | padding ]
    owned range                  [ o gate up  | norms ]        this rank's shard; under ZeRO 0 the bucket
    spans                        [ matrices   ][ norms]        cut where decay, rate or kinds change
    tensors of a span            exp_avg, exp_avg_sq, …        in at least fp32, or narrower (`state_tensors`)

The optimizer and the options of the run decide the tensors of a segment (`optimizer.registry.kinds_of`). They
are in the memory of the master weights. Saving, loading, copying and restoring treat all alike, so a new
optimizer is a list of kinds and a `step`. No communication.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.optimizer.registry import ADAMW, Kinds, state_spans
from megalite.parallel.sharding.bucket_buffers import BucketBuffers
from megalite.parallel.sharding.state_memory import StateRange
from megalite.parallel.sharding.store import ParameterStore
from megalite.parallel.spec import WEIGHT, FlatRectangle, Rectangle


@dataclass(frozen=True, eq=False)
class BucketSlice:
    """Elements [start, stop) of a bucket for which this rank keeps the same kinds of state.

    Attributes:
        decays: whether weight decay applies to its weights.
        lr_factor: factor on their learning rate (`optimizer.registry.lr_factor`).
        state: the tensors by name, [stop - start] each; of scales, a number for each block.
    """

    bucket: BucketBuffers
    start: int
    stop: int
    decays: bool
    lr_factor: float
    state: dict[str, Tensor]

    @property
    def owned(self) -> slice:
        """Slice of the span in tensors of the owned range, such as `bucket.master`."""
        return slice(self.start - self.bucket.start, self.stop - self.bucket.start)

    @property
    def master(self) -> Tensor:
        return self.bucket.master[self.owned]

    def range(self, kinds: Sequence[str], first: int = 0) -> StateRange:
        """Return the span's tensors for an elementwise optimizer with state of these names."""
        bucket, own = self.bucket, self.owned
        state = [self.state[kind] for kind in kinds]
        return StateRange(
            self.decays,
            self.lr_factor,
            bucket.owned_weights[own],
            bucket.owned_grads[own],
            bucket.master[own],
            state,
            first,
        )

    def rectangle(self, kind: str, flat: FlatRectangle, offset: int) -> Rectangle:
        """Return the part of the state of one kind that `flat`, in the stored tensor at `offset` of the
        bucket, describes."""
        tensor, first = self.state[kind], offset - self.start
        block = (self.stop - self.start) // tensor.numel()  # of a row's elements, for each number
        shape, offsets, sizes = (
            (*each[:-1], each[-1] // block) for each in (flat.segment.shape, flat.offsets, flat.sizes)
        )
        own = tensor[(first + flat.start) // block : (first + flat.stop) // block]
        return Rectangle(f"{kind}/{flat.segment.name}", shape, offsets, own.view(sizes))


class OptimizerState:
    """Optimizer state of one rank's trainable weights, initially zero.

    Args:
        kinds: the tensors of state of a segment (`optimizer.registry.kinds_of`).
        seed: keys the stochastic rounding of moments in bf16.

    Attributes:
        started: kind of state → updates of the weights before it started; 0 if it is not among them.
    """

    def __init__(self, store: ParameterStore, kinds: Kinds, seed: int = 0):
        self.store, self.seed = store, seed
        self.started: dict[str, int] = {}
        self._spans = {
            bucket: self._allocate(bucket, kinds) for bucket in store.buckets if bucket.layout.trainable
        }

    def _allocate(self, bucket: BucketBuffers, kinds: Kinds) -> list[BucketSlice]:
        zeros, dtype = self.store.state.zeros, bucket.master.dtype
        return [
            BucketSlice(
                bucket,
                span.start,
                span.stop,
                span.decays,
                span.lr_factor,
                {
                    kind.name: zeros(
                        (span.stop - span.start) // kind.block,
                        getattr(torch, kind.dtype) if kind.dtype else dtype,
                    )
                    for kind in span.kinds
                },
            )
            for span in state_spans(bucket.layout, bucket.start, bucket.stop, kinds)
        ]

    def spans(self, *kinds: str) -> list[BucketSlice]:
        """Return the spans that have state of all these kinds."""
        return [span for spans in self._spans.values() for span in spans if span.state.keys() >= set(kinds)]

    def span_at(self, bucket: BucketBuffers, element: int) -> BucketSlice:
        """Return the span of an owned element of a trainable bucket."""
        return next(span for span in self._spans[bucket] if span.start <= element < span.stop)

    def ages(self, step: int, kinds: Sequence[str]) -> dict[str, int]:
        """Return the number of updates of each kind of state since it was zero, up to a step's."""
        return {kind: step - self.started.get(kind, 0) for kind in kinds}

    def corrected(
        self, step: int, lr: float, weight_decay: float, betas: Sequence[float]
    ) -> tuple[int, float, float]:
        """Return the step, learning rate and weight decay with which AdamW corrects the bias of moments."""
        from megalite.optimizer.adamw_rule import with_ages  # only after a change of the optimizer

        return with_ages(betas, self.ages(step, ADAMW), lr, weight_decay)

    # ---- a step that is undone

    def changing(self) -> list[Tensor]:
        """Return all tensors that a step changes: master weights and state."""
        return [
            *(bucket.master for bucket in self._spans),
            *(tensor for span in self.spans() for tensor in span.state.values()),
        ]

    def copy(self) -> list[Tensor]:
        """Return copies of all tensors that a step changes."""
        return [tensor.clone() for tensor in self.changing()]

    def restore(self, copies: Sequence[Tensor]) -> None:
        """Undo all steps since `copy`.

        The weights follow with the next step, or with `ParameterStore.publish`.
        """
        for tensor, copy in zip(self.changing(), copies, strict=True):
            tensor.copy_(copy)

    # ---- checkpoints

    def to_save(self, kinds: Collection[str] | None = None) -> list[Rectangle]:
        """Return this rank's part of a checkpoint.

        Over all ranks, each element of weights and state occurs exactly once.

        Args:
            kinds: `WEIGHT`, or kinds of state; None: all.
        """
        return [
            rectangle
            for bucket, flat, offset in self.store.owned_rectangles()
            for kind, rectangle in self._rectangles(bucket, flat, offset)
            if kinds is None or kind in kinds
        ]

    def to_load(self, without: Collection[str] = ()) -> list[Rectangle]:
        """Return all tensors on this rank that a checkpoint must fill, tied copies and replicas included.

        Args:
            without: kinds that the checkpoint does not have.
        """
        return [
            rectangle
            for bucket in self.store.buckets
            for flat, offset in self.store.rectangles_in(bucket, bucket.start, bucket.stop)
            for kind, rectangle in self._rectangles(bucket, flat, offset)
            if kind not in without
        ]

    def _rectangles(
        self, bucket: BucketBuffers, flat: FlatRectangle, offset: int
    ) -> Iterator[tuple[str, Rectangle]]:
        yield WEIGHT, bucket.rectangle(WEIGHT, bucket.master, flat, offset)
        if bucket in self._spans:  # a frozen bucket has no state
            span = self.span_at(bucket, offset + flat.start)
            yield from ((kind, span.rectangle(kind, flat, offset)) for kind in span.state)
