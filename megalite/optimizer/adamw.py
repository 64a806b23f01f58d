"""AdamW (Loshchilov and Hutter 2019) over the owned ranges of flat buckets.

Each bucket consists of at most two ranges, one with weight decay and one without, so a step is a few fused calls for any number of tensors.
Ranges start and end on multiples of 32 elements: the place where a shard is cut changes no rounding. No communication.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megalite_kernels.adamw import adamw_
from torch import Tensor

from megalite.config.schema import OptimizerConfig
from megalite.optimizer.table import ADAMW, state_kinds
from megalite.parallel.sharding.bucket_buffers import BucketBuffers
from megalite.parallel.sharding.offload import StateRange
from megalite.parallel.sharding.store import ParameterStore
from megalite.parallel.spec import Rectangle, Segment

STATE = ("weight", *ADAMW)


class AdamW:
    """The optimizer state of one rank: two moments next to the store's master weights, with their dtype and in their memory.

    A bucket's owned range is this rank's shard of it (ZeRO 1 to 3) or all of it (ZeRO-0).
    """

    def __init__(self, store: ParameterStore, options: OptimizerConfig):
        self.store, self.options = store, options
        self._moments = {
            bucket: tuple(store.state.zeros(bucket.master.numel(), bucket.master.dtype) for _ in ADAMW)
            for bucket in store.buckets
            if bucket.layout.trainable
        }
        self._ranges = [each for bucket, moments in self._moments.items() for each in _ranges(bucket, moments)]

    def state_kinds(self, segment: Segment) -> tuple[str, ...]:
        """Both moments of a trainable segment."""
        return state_kinds(segment, "adamw")

    def step(self, step: int, lr: float, divisor: Tensor | None) -> None:
        """Update this rank's master weights, and its weights from them. `step` is 1-based; gradients are divided by `divisor`, a scalar."""
        options = self.options
        scale = None if divisor is None else divisor.to(self.store.state.device, non_blocking=True)  # stays on the device: no wait for it
        for window in self.store.state.windows(self._ranges):  # under offload a window at a time, its copies overlapped with updates
            adamw_(
                [each.master for each in window],
                [each.grads for each in window],
                [each.state[0] for each in window],
                [each.state[1] for each in window],
                [each.weights for each in window if each.separate],  # written in compute precision; else the masters are the weights
                step=step,
                lr=lr,
                beta1=options.betas[0],
                beta2=options.betas[1],
                eps=options.eps,
                weight_decay=options.weight_decay if window[0].decays else 0.0,
                grad_scale=scale,
            )

    def changing(self) -> list[Tensor]:
        """All tensors that a step changes: master weights and moments."""
        return [tensor for bucket, moments in self._moments.items() for tensor in (bucket.master, *moments)]

    def copy_state(self) -> list[Tensor]:
        """Copies of all tensors that a step changes."""
        return [tensor.clone() for tensor in self.changing()]

    def restore_state(self, copies: Sequence[Tensor]) -> None:
        """Undo all steps since `copy_state`. The weights follow with the next `step`, or with `ParameterStore.publish`."""
        for tensor, copy in zip(self.changing(), copies, strict=True):
            tensor.copy_(copy)

    def to_save(self, kinds: Sequence[str] | None = None) -> list[Rectangle]:
        """This rank's part of a checkpoint: over all ranks, each element of weights and moments exactly once."""
        return [
            bucket.rectangle(kind, values, flat, offset)
            for bucket, flat, offset in self.store.owned_rectangles()
            for kind, values in self._states(bucket)
            if kinds is None or kind in kinds
        ]

    def to_load(self) -> list[Rectangle]:
        """Everything on this rank that a checkpoint must fill, tied copies and replicas included."""
        return [
            bucket.rectangle(kind, values, flat, offset)
            for bucket in self.store.buckets
            for flat, offset in self.store.rectangles_in(bucket, bucket.start, bucket.stop)
            for kind, values in self._states(bucket)
        ]

    def _states(self, bucket: BucketBuffers) -> Iterator[tuple[str, Tensor]]:
        """The owned range of each kind of state of a bucket."""
        yield "weight", bucket.master
        yield from zip(ADAMW, self._moments.get(bucket, ()), strict=False)  # a frozen bucket has no moments


def _ranges(bucket: BucketBuffers, moments: Sequence[Tensor]) -> Iterator[StateRange]:
    """The owned range of a bucket, cut where weight decay starts or ends."""
    for start, stop, decays in bucket.layout.decay_ranges(bucket.start, bucket.stop):
        own = slice(start - bucket.start, stop - bucket.start)
        state = [each[own] for each in moments]
        yield StateRange(decays, bucket.owned_weights[own], bucket.owned_grads[own], bucket.master[own], state)
