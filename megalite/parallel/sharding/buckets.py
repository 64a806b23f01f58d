"""Bucket layout: the offset of each stored tensor in a few flat buffers.

It is a pure function of the specs. Whole units (embedding, a layer, the head) share a bucket up to the bucket
size, so that the gradients of a bucket complete together and the weights of a layer are gathered together.
Inside a bucket, tensors with weight decay come first, so that the optimizer updates two ranges. Buckets of
their own have tied tensors, so that both copies are sharded alike, and tensors that are kept differently:
frozen ones, which need no gradients, those that are at least fp32 whatever the compute precision is, matrices
whose fp8 codes ZeRO-3 gathers, and quantized ones (`parallel.quantized.layout`). Of some of them a layer has
few numbers, so one bucket usually has those of all layers of a rank: one bucket per layer would be mostly
padding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, product

from megalite.mesh.layout import Coordinates
from megalite.parallel.fp8_choice import BLOCKS
from megalite.parallel.quantized.layout import MatrixBytes, matrix_bytes
from megalite.parallel.spec import ParamSpec

ALIGN = 32  # elements, 128 bytes of fp32: every vector load and cache line starts at a tensor's start
SHARD_ALIGN = 64  # elements: shard boundaries that do not change rounding in vectorized optimizers


@dataclass(frozen=True)
class Slot:
    """Position of a stored tensor in its bucket: elements [start, stop), with this local shape.

    Attributes:
        quantized: the bytes of a quantized matrix.
    """

    spec: ParamSpec
    shape: tuple[int, ...]
    start: int
    quantized: MatrixBytes | None = None

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


@dataclass(frozen=True)
class BucketLayout:
    """Layout of a flat buffer. All its tensors belong to one domain.

    Attributes:
        slots: the tensors, in order.
        size: number of elements, a multiple of owners × 64.
        owners: number of equal parts. Each rank of the domain counts one of them in norms and stores it in
            checkpoints.
    """

    slots: tuple[Slot, ...]
    size: int
    owners: int

    @property
    def units(self) -> frozenset[int]:
        """Units of the model whose weights are in this bucket."""
        return frozenset(slot.spec.unit for slot in self.slots)

    @property
    def trainable(self) -> bool:
        return self.slots[0].spec.trainable

    @property
    def at_least_fp32(self) -> bool:
        """Whether its weights are at least fp32 (`ParamSpec.at_least_fp32`), else in compute precision."""
        return self.slots[0].spec.at_least_fp32

    @property
    def coded(self) -> bool:
        """Whether the fp8 codes of its weights are gathered (`ParamSpec.coded`)."""
        return self.slots[0].spec.coded

    @property
    def blocks(self) -> int:
        """Number of scales of these codes."""
        return sum(math.prod(slot.shape) for slot in self.slots) // BLOCKS["block"] ** 2 if self.coded else 0

    @property
    def quantized_bytes(self) -> int:
        """Return the bytes of quantized matrices, a multiple of owners × 64; 0: the bucket has weights."""
        last = self.slots[-1].quantized
        return 0 if last is None else _round_up(last.stop, self.owners * SHARD_ALIGN)

    @property
    def domain(self) -> str:
        return self.slots[0].spec.domain

    @property
    def tied(self) -> bool:
        """Whether the bucket is a tied tensor, which is alone in its bucket."""
        return self.slots[0].spec.tied

    @property
    def both_ends(self) -> bool:
        """Whether the first and the last stage share the bucket's tensor on this rank."""
        return any(slot.spec.both_ends for slot in self.slots)

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """Return ranges of padding, between tensors and at the end."""
        starts, stops = (
            [*(slot.start for slot in self.slots), self.size],
            [0, *(slot.stop for slot in self.slots)],
        )
        return [(stop, start) for stop, start in zip(stops, starts, strict=True) if stop < start]

    def owned(self, index: int) -> tuple[int, int]:
        """Return start and end of the part that owner `index` counts in norms and stores in checkpoints."""
        return self.part(index, self.owners)

    def part(self, index: int, parts: int) -> tuple[int, int]:
        """Return start and end of one of `parts` equal parts. `owners` must be divisible by `parts`."""
        length = self.size // parts
        return index * length, (index + 1) * length


def buckets_of_units(layouts: Sequence[BucketLayout]) -> dict[int, tuple[int, ...]]:
    """Return the indices of the buckets that each unit computes with.

    The last unit also needs the bucket of the embedding if they share a tensor on this rank.
    """
    last = max(chain.from_iterable(layout.units for layout in layouts))
    numbers: dict[int, tuple[int, ...]] = {}
    for number, layout in enumerate(layouts):
        shared = {last} if layout.both_ends else set()
        for unit in layout.units | shared:
            numbers[unit] = (*numbers.get(unit, ()), number)
    return numbers


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _bucket(specs: Sequence[ParamSpec], at: Coordinates, owners: int, pad: int) -> BucketLayout:
    slots, start, byte = list[Slot](), 0, 0
    # stable: those with decay first, those with one learning rate together, each group in the model's order
    for spec in sorted(specs, key=lambda spec: (not spec.decay, -spec.segments[0].growth[1])):
        quantized = None if spec.base is None else matrix_bytes(spec, at, byte)
        slots.append(Slot(spec, spec.local_shape(at), start, quantized))
        start = _round_up(slots[-1].stop, max(pad, ALIGN))
        byte = 0 if quantized is None else quantized.stop
    return BucketLayout(tuple(slots), _round_up(start, owners * max(pad, SHARD_ALIGN)), owners)


def _kept(spec: ParamSpec) -> tuple[object, ...]:
    """Return how a tensor is kept. Those of a bucket are kept alike."""
    return spec.domain, spec.trainable, spec.at_least_fp32, spec.coded, spec.base


def bucket_layout(
    specs: Sequence[ParamSpec], at: Coordinates, owners: Mapping[str, int], bucket_bytes: float, pad: int = 0
) -> list[BucketLayout]:
    """Return the buckets of one pipeline rank, in the order of the model.

    Args:
        specs: the stored tensors of this rank, in the order of the model.
        at: the rank's coordinates on the axes that split tensors.
        owners: for each domain, the number of ranks among which each element of a bucket has one owner.
        bucket_bytes: maximum size of a bucket, in bytes of fp32 gradients; a larger unit has its own bucket.
        pad: tensors and shards start at multiples of it, if it is larger than ALIGN and SHARD_ALIGN.
    """
    alone = [[spec] for spec in specs if spec.tied]
    groups: list[list[ParamSpec]] = []
    domains = dict.fromkeys(spec.domain for spec in specs)
    forms = dict.fromkeys(spec.base for spec in specs)
    for alike in product(domains, (True, False), (False, True), (False, True), forms):
        rest = [spec for spec in specs if not spec.tied and _kept(spec) == alike]
        filled = math.inf
        for _, unit in groupby(rest, key=lambda spec: spec.unit):
            members = list(unit)
            unit_bytes = 4.0 * sum(math.prod(spec.local_shape(at)) for spec in members)
            if filled + unit_bytes > bucket_bytes:
                groups.append([])
                filled = 0.0
            groups[-1].extend(members)
            filled += unit_bytes
    groups = sorted((*alone, *groups), key=lambda group: group[0].unit)
    return [_bucket(group, at, owners[group[0].domain], pad) for group in groups]
