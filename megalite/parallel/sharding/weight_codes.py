"""fp8 codes of sharded weights, which ZeRO-3 gathers instead of the weights (`train.fp8`).

A block of 128 × 128 elements has one scale, but shards cut blocks. When the weights have changed, each rank
therefore finds the largest magnitude of its part of each block, the ranks take the maximum of these, and each
rank casts its shard. Codes and scales are those of the whole matrix, bit for bit. Every rank computes and
keeps all scales, so that only codes are gathered, one byte per element.

Communication: when weights have changed, one all-reduce over each shard axis, of 4 bytes per block.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from megalite_kernels.fp8 import BLOCK, Quantized, scale_factors
from megalite_kernels.fp8_ranges import block_maxima, block_rows, quantize_range
from torch import Tensor

from megalite.mesh.mesh import MeshAxis
from megalite.parallel.collectives import all_reduce_max
from megalite.parallel.sharding.buckets import BucketLayout

if TYPE_CHECKING:
    from megalite.parallel.sharding.bucket_buffers import BucketBuffers

LARGEST_RANGE = 1 << 24
"""Elements that are quantized at a time, a multiple of 32; temporary tensors have a few times their size."""


class WeightCodes:
    """Codes and scales of the matrices of a bucket, of which this rank owns elements [start, stop).

    Attributes:
        shard: [stop - start] uint8, the codes of this rank's shard.
        full: [size] uint8; `BucketBuffers.free` frees its memory while it is not in use.
        scales: [blocks] fp32, of all matrices, one after the other.
    """

    def __init__(self, layout: BucketLayout, start: int, stop: int, power_of_two: bool, device: torch.device):
        self.layout, self.start, self.power_of_two = layout, start, power_of_two
        self.shard = torch.zeros(stop - start, dtype=torch.uint8, device=device)
        self.full = torch.zeros(layout.size, dtype=torch.uint8, device=device)
        self.scales = torch.zeros(layout.blocks, device=device)

    @property
    def kept(self) -> Tensor:
        """The codes that this rank keeps."""
        return self.shard

    @property
    def tensors(self) -> Sequence[Tensor]:
        """All memory of codes and scales."""
        return self.full, self.shard, self.scales

    def matrix(self, index: int) -> Quantized:
        """Return views of the codes and scales of the matrix in a slot, [rows, columns].

        They can be made before `full` is freed, and stay valid.
        """
        slot = self.layout.slots[index]
        codes = self.full.view(torch.float8_e4m3fn)[slot.start : slot.stop].view(slot.shape)
        return Quantized(codes, self._of_matrix(self.scales, index))

    def maxima(self, weights: Tensor) -> Tensor:
        """Return the largest magnitudes of a shard's weights ([stop - start]) in each block, [blocks].

        They are bits of fp32 numbers as integers.
        """
        maxima = torch.zeros_like(self.scales, dtype=torch.int32)
        for each in self._ranges(weights):
            own = self._of_matrix(maxima, each.number)[each.rows]
            torch.maximum(own, block_maxima(each.values, each.start, each.columns), out=own)
        return maxima

    def update(self, weights: Tensor, maxima: Tensor) -> None:
        """Compute the codes of the shard, and all scales.

        Args:
            weights: [stop - start].
            maxima: [blocks], those of whole blocks.
        """
        factors = scale_factors(maxima.view(torch.float32), self.power_of_two)
        torch.reciprocal(factors, out=self.scales)
        codes = self.shard.view(torch.float8_e4m3fn)
        for each in self._ranges(weights):
            own = self._of_matrix(factors, each.number)[each.rows]
            codes[each.place] = quantize_range(each.values, each.start, each.columns, own)

    def _ranges(self, weights: Tensor) -> Iterator[_Range]:
        """Yield the ranges of matrices that a shard ([stop - start]) consists of."""
        for index, slot in enumerate(self.layout.slots):
            low, high = max(self.start, slot.start), min(self.start + len(weights), slot.stop)
            for start in range(low, high, LARGEST_RANGE):
                stop = min(start + LARGEST_RANGE, high)
                place = slice(start - self.start, stop - self.start)
                yield _Range(index, weights[place], place, start - slot.start, slot.shape[-1])

    def _of_matrix(self, blocks: Tensor, index: int) -> Tensor:
        """Return the view of one number per block ([blocks]) for a slot, [rows / 128, columns / 128]."""
        sizes = [math.prod(slot.shape) // BLOCK**2 for slot in self.layout.slots]
        first, (rows, columns) = sum(sizes[:index]), self.layout.slots[index].shape
        return blocks[first : first + sizes[index]].view(rows // BLOCK, columns // BLOCK)


class _Range(NamedTuple):
    """Consecutive elements of a matrix in a shard.

    Attributes:
        number: of the matrix in its bucket.
        place: of the elements in the shard.
        start: their start in the flattened matrix, which has `columns` columns.
    """

    number: int
    values: Tensor
    place: slice
    start: int
    columns: int

    @property
    def rows(self) -> slice:
        """Rows of blocks that the elements touch."""
        return block_rows(self.start, self.start + len(self.values), self.columns)


@torch.no_grad()
def update_codes(buckets: Iterable[BucketBuffers]) -> None:
    """Compute the codes of buckets whose weights have changed. Collective over their shard axes."""
    by_axis: defaultdict[MeshAxis, list[tuple[WeightCodes, Tensor]]] = defaultdict(list)
    for bucket in buckets:
        if isinstance(bucket.codes, WeightCodes):
            by_axis[bucket.domain.shard].append((bucket.codes, bucket.owned_weights))
    for axis, own in by_axis.items():
        maxima = all_reduce_max(torch.cat([codes.maxima(weights) for codes, weights in own]), axis).wait()
        parts = maxima.split([codes.layout.blocks for codes, _ in own])
        for (codes, weights), whole in zip(own, parts, strict=True):
            codes.update(weights, whole)
