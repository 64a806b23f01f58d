"""Buffers of a bucket on one rank: weights, master weights and, with ZeRO-3, its shard of the weights.

This module does no communication.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megalite.mesh.layout import Coordinates
from megalite.mesh.mesh import Domain
from megalite.parallel.collectives import Pending
from megalite.parallel.sharding.buckets import BucketLayout
from megalite.parallel.sharding.gradient_bucket import GradientBucket
from megalite.parallel.spec import FlatRectangle, Rectangle, rectangles

if TYPE_CHECKING:
    from megalite.parallel.quantized.buffers import QuantizedBuffers
    from megalite.parallel.sharding.weight_codes import WeightCodes


@dataclass(eq=False)
class BucketBuffers:
    """Buffers of a bucket.

    `master` covers [start, stop), the range whose optimizer state this rank keeps. If the weights are in fp32
    or fp64, they are their own masters, unless optimizer state is offloaded; masters of weights in bf16 and
    fp16 are a separate fp32 copy. Frozen weights are their own masters in any precision, and every rank keeps
    all of them, except under ZeRO-3. Quantized matrices have codes alone: `start` and `stop` are 0.
    """

    layout: BucketLayout
    domain: Domain  # the ranks that shard and reduce it
    weights: Tensor  # [size], as the model reads them; under ZeRO-3 without memory while not in use
    gradients: GradientBucket | None  # None for frozen buckets and without training
    start: int
    stop: int
    master: Tensor  # [stop - start], at least fp32, on the device of the optimizer state
    shard: Tensor | None  # [stop - start], in the dtype of the weights, under ZeRO-3
    # are kept or gathered instead of the weights, which then never have memory
    codes: WeightCodes | QuantizedBuffers | None = None
    gathering: Pending | None = None  # the all-gather in flight

    @property
    def owned_grads(self) -> Tensor:
        assert self.gradients is not None
        return self.gradients.owned

    @property
    def owned_weights(self) -> Tensor:
        return self.weights[self.start : self.stop] if self.shard is None else self.shard

    @property
    def has_own_master(self) -> bool:
        """Whether the master weights are a copy of the weights."""
        return not self.layout.quantized_bytes and self.owned_weights.data_ptr() != self.master.data_ptr()

    @property
    def full(self) -> Tensor:
        """[size]: what is gathered, weights or their codes, or the bytes of quantized matrices."""
        return self.weights if self.codes is None else self.codes.full

    @property
    def resident(self) -> bool:
        """Whether memory for the full weights is allocated."""
        return self.full.untyped_storage().nbytes() > 0

    def await_weights(self) -> None:
        """Wait until the full weights are gathered."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None

    def allocate(self) -> None:
        """Allocate the memory of the full weights.

        Resizing the storage, here and in `free`, keeps each weight's view of it valid.
        """
        self.full.untyped_storage().resize_(self.full.nbytes)

    def free(self) -> None:
        """Free the memory of the full weights."""
        self.full.untyped_storage().resize_(0)

    def write(self, start: int, values: Tensor) -> None:
        """Write to the masters and weights of a flat range of the bucket, as far as this rank keeps it."""
        low, high = max(start, self.start), min(start + values.numel(), self.stop)
        own = slice(low - self.start, high - self.start)
        with torch.no_grad():
            self.master[own] = values[low - start : high - start]
            if self.has_own_master:
                self.owned_weights[own] = self.master[own]  # on their device, instead of a second upload

    def rectangle(self, kind: str, values: Tensor, flat: FlatRectangle, offset: int) -> Rectangle:
        """Return the part of `values` ([stop - start], one per owned element) that `flat` describes.

        Args:
            kind: prefix of the rectangle's name in a checkpoint.
            offset: start of flat's stored tensor in the bucket.
        """
        own = slice(offset + flat.start - self.start, offset + flat.stop - self.start)
        return Rectangle(
            f"{kind}/{flat.segment.name}", flat.segment.shape, flat.offsets, values[own].view(flat.sizes)
        )

    def rectangles_in(self, start: int, stop: int, at: Coordinates) -> Iterator[tuple[FlatRectangle, int]]:
        """Yield the rectangles of global tensors in [start, stop).

        Each comes with the start of its stored tensor in the bucket.
        """
        for slot in self.layout.slots:
            low, high = max(start, slot.start) - slot.start, min(stop, slot.stop) - slot.start
            if low < high:
                for rectangle in rectangles(slot.spec, at, low, high):
                    yield rectangle, slot.start
