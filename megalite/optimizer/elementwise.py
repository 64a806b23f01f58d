"""Steps of an elementwise optimizer over the owned ranges of flat buckets (`update_rule.UpdateRule`).

    piece     weights, gradients and state of up to PIECE elements, in the dtype of the master weights
    update    the rule's, of all elements alike
    store     state in the precision of `optimizer.moments` (`megalite_kernels.moments`), weights in compute
              precision

The result of an element depends on its gradient and state, and, for bf16 moments, on its index in the global
tensor: no layout changes a bit. Blocks of 8-bit moments are whole on every rank. No communication.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from megalite_kernels import moments
from torch import Tensor

from megalite.optimizer.state import BucketSlice, OptimizerState
from megalite.optimizer.state_tensors import is_positive, kind_of
from megalite.optimizer.update_rule import UpdateRule, UpdateStep
from megalite.parallel.sharding.state_memory import StateRange

PIECE = 1 << 22
"""Elements whose state is unpacked at a time; a multiple of the largest block."""


class _Place(NamedTuple):
    """Elements [start, stop) of all ranges, a rectangle of a global tensor.

    Attributes:
        tensor: number that identifies the tensor.
        offset: index of the first element in the tensor.
        width, pitch: columns of the rectangle, and of the tensor.
    """

    start: int
    stop: int
    tensor: int
    offset: int
    width: int
    pitch: int

    def indices(self, start: int, stop: int, device: torch.device) -> Tensor:
        """Return the indices in the global tensor of some of the elements, int64."""
        elements = torch.arange(start - self.start, stop - self.start, device=device)
        rows = elements // self.width if self.width < self.pitch else 0
        return elements + self.offset + rows * (self.pitch - self.width)


class ElementwiseOptimizer:
    """Optimizer whose updates are a rule's.

    Args:
        state: has the kinds of the rule.
    """

    def __init__(self, state: OptimizerState, rule: UpdateRule):
        self.state, self.rule = state, rule
        self._ranges: list[StateRange] = []
        self._places: list[_Place] = []  # in order
        self._names: dict[int, list[str]] = {}  # of the tensors of a range, by its first element
        first = 0
        for span in state.spans(*rule.state):
            names = [name for name in span.state if kind_of(name) in rule.state]
            self._names[first] = names
            self._ranges.append(span.range(names, first))
            self._places += self._rectangles(span, first)
            first += span.stop - span.start

    def _rectangles(self, span: BucketSlice, first: int) -> Iterator[_Place]:
        """Yield where the elements of a span are in global tensors, if they are rounded stochastically."""
        if all(tensor.dtype != torch.bfloat16 for tensor in span.state.values()):
            return
        for flat, offset in self.state.store.rectangles_in(span.bucket, span.start, span.stop):
            shift = first + offset - span.start
            index = 0
            for place, size in zip(flat.offsets, flat.segment.shape, strict=True):
                index = index * size + place
            width, pitch = flat.sizes[-1], flat.segment.shape[-1]
            name = moments.tensor_number(flat.segment.name)
            yield _Place(shift + flat.start, shift + flat.stop, name, index, width, pitch)

    @torch.no_grad()
    def step(self, step: int, lr: float, divisor: Tensor | None) -> None:
        """As in `registry.Optimizer`."""
        memory, options = self.state.store.state, self.rule.options
        ages = self.state.ages(step, self.rule.state)
        keys = {
            kind: moments.rounding_key(self.state.seed, step, n) for n, kind in enumerate(self.rule.state)
        }
        # stays on the device: the host does not wait for it
        scale = None if divisor is None else divisor.to(memory.device, non_blocking=True)
        for window in memory.windows(self._ranges):
            for each in window:
                rate = lr * each.lr_factor
                # lr · weight_decay is the same for all
                decay = options.weight_decay / each.lr_factor if each.decays else 0.0
                for piece in each.cut(PIECE):
                    self._update(piece, UpdateStep(step, rate, decay, ages), keys, scale)

    def _update(
        self, piece: StateRange, step: UpdateStep, keys: Mapping[str, int], scale: Tensor | None
    ) -> None:
        """Update a piece.

        Args:
            keys: of the stochastic rounding, by kind of state.
            scale: divisor of gradients; NaN: skip the update.
        """
        master, grads = piece.master, piece.grads.to(piece.master.dtype)
        stored = self._stored(piece)
        values = {kind: self._unpacked(kind, tensors, master.dtype) for kind, tensors in stored.items()}
        if scale is None:
            self.rule.update(master, grads, values, step)
            skip = None
        else:
            skip, weights = scale.isnan(), master.clone()
            values = {
                kind: value.clone() if value is stored[kind][0] else value for kind, value in values.items()
            }
            self.rule.update(weights, grads / scale, values, step)
            _write(master, weights, skip)
        for kind, tensors in stored.items():
            packed = self._packed(kind, tensors, values[kind], piece.first, keys[kind])
            for tensor, new in zip(tensors, packed, strict=True):
                _write(tensor, new, skip)
        if piece.separate:
            piece.weights.copy_(master)

    def _stored(self, piece: StateRange) -> dict[str, list[Tensor]]:
        """Return the tensors of each kind of state of a piece."""
        first = max(start for start in self._names if start <= piece.first)
        tensors: dict[str, list[Tensor]] = {kind: [] for kind in self.rule.state}
        for name, tensor in zip(self._names[first], piece.state, strict=True):
            tensors[kind_of(name)].append(tensor)
        return tensors

    def _unpacked(self, kind: str, tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
        """Return the values of a kind of state, the stored tensor itself if it has their dtype."""
        if len(tensors) == 2:
            codes, scales = tensors
            return moments.decode(codes, scales, not is_positive(kind), dtype)
        return tensors[0].to(dtype)

    def _packed(
        self, kind: str, tensors: list[Tensor], values: Tensor, first: int, key: int
    ) -> Sequence[Tensor]:
        """Return the values of a kind of state as they are stored, in new tensors unless the dtype is theirs.

        Args:
            first: number of the first element.
        """
        if len(tensors) == 2:
            return moments.encode(values, len(tensors[1]), not is_positive(kind))
        if tensors[0].dtype != torch.bfloat16:
            return (values,)
        rounded = torch.zeros_like(tensors[0])  # padding stays zero
        for place in self._places[bisect_right(self._places, first, key=lambda place: place.stop) :]:
            start, stop = max(place.start, first), min(place.stop, first + values.numel())
            if start >= stop:
                break
            indices = place.indices(start, stop, values.device)
            bits = moments.random_bits(key, place.tensor, indices)
            own = slice(start - first, stop - first)
            rounded[own] = moments.stochastic_bf16(values[own], bits)
        return (rounded,)


def _write(tensor: Tensor, new: Tensor, skip: Tensor | None) -> None:
    """Write new values, unless the step is skipped: the device decides."""
    if new is not tensor:
        tensor.copy_(new if skip is None else torch.where(skip, tensor, new))
