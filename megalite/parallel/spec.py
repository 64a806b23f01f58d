"""Parameter specs: the global tensors of a stored parameter, and the part of them on each rank.

A stored tensor is an ordered list of *segments* along dim 0: the fused query-key-value projection is one
tensor for the matmul, but three segments for initialization, gradient norm, checkpoints, conversion and
counting, which never use the fused form. Everything here is plain data computed from sizes, so a planner can
evaluate it for 16,384 ranks without starting one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from megalite.mesh.layout import Coordinates, Layout
from megalite.parallel.initial_values import InitialValues

if TYPE_CHECKING:
    from torch import Tensor

    from megalite.parallel.quantized.layout import BaseForm

WEIGHT, EMA = "weight", "ema"
"""Kinds of tensors in a checkpoint, which names a tensor KIND/NAME.

They are weights and their moving averages (`train.ema_decay`). Optimizers add theirs (`optimizer.registry`).
"""


@dataclass(frozen=True)
class LocalPart:
    """Part of a segment on one rank."""

    offsets: tuple[int, ...]  # global index of its first element
    sizes: tuple[int, ...]  # without padding
    shape: tuple[int, ...]  # in memory, with padding

    @property
    def numel(self) -> int:
        """Return the number of elements in memory, including padding."""
        return prod(self.shape)


@dataclass(frozen=True)
class Segment:
    """One global tensor of the model.

    Attributes:
        name: global name, with the global layer index.
        shape: global shape, without padding.
        split: the dimension that is split over `axis`; None if every rank of the axis holds the whole tensor.
        axis: the mesh axis that the tensor is split or replicated over.
        replicas: number of neighbouring ranks of the axis that hold the same part (key-value heads if tp
            exceeds their number).
        padded: length of the split dimension in memory, summed over the ranks, if it is padded (vocabulary);
            else 0.
        grad_partial_axis: the mesh axis whose ranks each compute a partial gradient, which must be summed
            over the axis.
        decay: whether weight decay applies.
        trainable: whether it has a gradient and optimizer state.
        copy: whether this is the second copy of a tied tensor, which is neither counted nor stored.
        init_std, init_value: initialized from normal(0, init_std), or to the constant init_value if init_std
            is 0.
        initial: initial values of another kind, instead of these.
        role: q, k, v, o, gate, up or down for the weights of a layer's projections, experts.in and
            experts.down for those of its experts; embedding, head, norms, adapter; empty for others.
        experts: number of experts, whose equal parts of the tensor are stacked along dim 0; 1: it is a single
            matrix.
        fused: number of equal matrices that each of these parts consists of (gate and up).
        growth: rows and columns of the matrix over those of the model for which learning rates were chosen
            (`model.mup`). A table of the vocabulary or of positions, and a vector, count as (1, 1).
    """

    name: str
    shape: tuple[int, ...]
    split: int | None = None
    replicas: int = 1
    padded: int = 0
    grad_partial_axis: str | None = None
    decay: bool = True
    trainable: bool = True
    copy: bool = False
    init_std: float = 0.0
    init_value: float = 0.0
    role: str = ""
    axis: str = "tp"
    experts: int = 1
    fused: int = 1
    initial: InitialValues | None = None
    growth: tuple[float, float] = (1.0, 1.0)

    @property
    def numel(self) -> int:
        """Return the number of elements of the global tensor, without padding."""
        return prod(self.shape)

    def local(self, at: Coordinates) -> LocalPart:
        """Return the part on the rank at these coordinates.

        Raises:
            ValueError: the split dimension is not divisible by the number of parts.
        """
        rank, size = at[self.axis]
        if self.split is None or size == 1 and not self.padded:
            return LocalPart((0,) * len(self.shape), self.shape, self.shape)
        length = self.padded or self.shape[self.split]
        parts = size // self.replicas
        if length % parts:
            raise ValueError(
                f"{self.name}: dimension {self.split} of size {length} is not divisible into "
                f"{parts} equal parts"
            )
        per_rank = length // parts
        # The last ranks may hold fewer elements than per_rank, or none: the rest is padding.
        start = min(rank // self.replicas * per_rank, self.shape[self.split])
        count = min(per_rank, self.shape[self.split] - start)

        def replaced(values: Sequence[int], value: int) -> tuple[int, ...]:
            return tuple(value if dim == self.split else old for dim, old in enumerate(values))

        zeros = (0,) * len(self.shape)
        return LocalPart(replaced(zeros, start), replaced(self.shape, count), replaced(self.shape, per_rank))

    def is_owner(self, at: Coordinates) -> bool:
        """Return whether the rank at these coordinates counts its part in norms and stores it in checkpoints.

        Each element has one owner.
        """
        rank = at[self.axis].rank
        first = rank == 0 if self.split is None else rank % self.replicas == 0
        return first and not self.copy


@dataclass(frozen=True)
class ParamSpec:
    """One stored tensor.

    Attributes:
        unit: the unit of the model that it belongs to: 0 embedding, 1 … L layers, L+1 head.
        segments: its global tensors, concatenated along dim 0.
        tied: whether the first and the last stage use the same values, because the embedding is also the head
            or the last stage embeds further tokens.
        both_ends: whether they share the tensor on this rank.
        contributions: gradient contributions per microbatch, one for each use.
        domain: name of the ranks that shard and reduce it (`Mesh.domain`).
        coded: whether its fp8 codes are gathered instead of its weight (ZeRO-3, `parallel.fp8_choice`).
        at_least_fp32: whether its weight is fp32 also if the compute precision is narrower. For the decay
            rates and time steps of recurrences: rounded to bf16, log rates would change rates by one percent.
        base: the form in which its frozen weights are quantized (`lora.base`); None: they are not.
    """

    name: str
    unit: int
    segments: tuple[Segment, ...]
    tied: bool = False
    contributions: int = 1
    both_ends: bool = False
    domain: str = "dense"
    at_least_fp32: bool = False
    coded: bool = False
    base: BaseForm | None = None

    def local_shape(self, at: Coordinates) -> tuple[int, ...]:
        """Return the shape in memory on the rank at these coordinates."""
        shapes = [segment.local(at).shape for segment in self.segments]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    @property
    def decay(self) -> bool:
        return self.segments[0].decay

    @property
    def trainable(self) -> bool:
        return self.segments[0].trainable


def parameter_count(specs: Sequence[ParamSpec]) -> int:
    """Return the number of parameters, counting each global element once, without padding and tied copies."""
    return sum(segment.numel for spec in specs for segment in spec.segments if not segment.copy)


@dataclass(frozen=True)
class FlatRectangle:
    """A rectangle of a segment that is contiguous in memory.

    It consists of elements [start, stop) of the stored tensor, at global offsets and sizes.
    """

    segment: Segment
    start: int
    stop: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass
class Rectangle:
    """A rectangle of a global tensor with its local memory, the unit of checkpoints and of resharding."""

    name: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor  # contiguous, with the shape of the rectangle

    def split(self, most: int) -> Iterator[Rectangle]:
        """Split into rectangles of whole rows with at most `most` bytes each, or with a single row."""
        rows = max(most * self.tensor.shape[0] // max(self.tensor.nbytes, 1), 1)
        first, *others = self.offsets
        for index, part in enumerate(self.tensor.split(rows)):
            yield Rectangle(self.name, self.global_shape, (first + index * rows, *others), part)


def rectangles(spec: ParamSpec, at: Coordinates, start: int, stop: int) -> Iterator[FlatRectangle]:
    """Yield the rectangles of global tensors that cover elements [start, stop) of the flattened tensor.

    Padding is not included. A range of a row-major matrix consists of at most three rectangles per segment:
    the end of a row, whole rows, the start of a row.
    """
    base = 0
    for segment in spec.segments:
        part = segment.local(at)
        width = prod(part.shape[1:])
        low, high = max(start - base, 0), min(stop - base, part.sizes[0] * width)
        while low < high:
            row, column = divmod(low, width)
            if column == 0 and high - low >= width:  # whole rows
                rows = (high - low) // width
                end = low + rows * width
                sizes: tuple[int, ...] = (rows, *part.sizes[1:])
            else:  # a part of one row
                end = min(high, (row + 1) * width)
                sizes = (1, end - low)
            offsets = (
                part.offsets[0] + row,
                *(offset + (column if dim == 0 else 0) for dim, offset in enumerate(part.offsets[1:])),
            )
            yield FlatRectangle(segment, base + low, base + end, offsets, sizes[: len(part.shape)])
            low = end
        base += prod(part.shape)


class HeldPart(NamedTuple):
    """A part of a segment, and the ranks that hold it."""

    segment: Segment
    part: LocalPart
    ranks: tuple[int, ...]


def holders(spec: ParamSpec, layout: Layout, pp_rank: int) -> list[HeldPart]:
    """Return the ranks that hold each part of a stored tensor of a pipeline rank.

    ZeRO, which divides the parts further, is not included.
    """
    holders: dict[tuple[Segment, LocalPart], list[int]] = {}
    for rank in range(layout.world):
        if layout.position(rank)["pp"] == pp_rank:
            for segment in spec.segments:
                holders.setdefault((segment, segment.local(layout.coordinates(rank))), []).append(rank)
    return [HeldPart(segment, part, tuple(ranks)) for (segment, part), ranks in holders.items()]
