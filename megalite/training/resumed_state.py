"""Optimizer state of a checkpoint that was kept otherwise: in another precision, or by another optimizer.

A moment is read as the checkpoint has it, decoded and written as this run keeps it, on every rank for its own
elements: another layout reads the same values. Kinds that the checkpoint does not have start at zero, and
`OptimizerState.started` says when, for the correction of their bias. No communication.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from megalite_kernels import moments
from torch import Tensor

from megalite import checkpoint
from megalite.checkpoint import Manifest
from megalite.checkpoint.checksummed_chunks import dtype_name
from megalite.config.load import from_dict
from megalite.config.sections.optimizer import OptimizerConfig
from megalite.optimizer.state import OptimizerState
from megalite.optimizer.state_tensors import SCALES, is_positive, kind_of
from megalite.parallel.sharding.bucket_buffers import BucketBuffers
from megalite.parallel.spec import EMA, WEIGHT, FlatRectangle, Rectangle


class _Moment(NamedTuple):
    """One kind of state of a rectangle of a global tensor, in the tensors in which this run keeps it."""

    kind: str
    segment: str
    kept: Sequence[Rectangle]

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.segment}"

    def is_stored(self, manifest: Manifest) -> bool:
        """Return whether a checkpoint has it as this run keeps it."""
        stored = [manifest.tensors.get(part.name) for part in self.kept]
        return all(
            each is not None and each.dtype == dtype_name(part.tensor.dtype)
            for part, each in zip(self.kept, stored, strict=True)
        ) and (len(self.kept) == 2 or f"{self.kind}.{SCALES}/{self.segment}" not in manifest.tensors)

    def write(self, values: Tensor | None) -> None:
        """Write values, or zeros."""
        if values is None:
            for part in self.kept:
                part.tensor.zero_()
        elif len(self.kept) == 1:
            self.kept[0].tensor.copy_(values)
        else:
            codes, scales = (part.tensor for part in self.kept)
            encoded = moments.encode(values.reshape(-1), scales.numel(), not is_positive(self.kind))
            for tensor, new in zip((codes, scales), encoded, strict=True):
                tensor.copy_(new.view(tensor.shape))


@dataclass(frozen=True)
class _Stored:
    """A moment as a checkpoint has it: tensors to fill, which `values` then decodes."""

    moment: _Moment
    parts: Sequence[Rectangle]
    skipped: int  # elements of the first block of a row that come before the rectangle

    @staticmethod
    def of(moment: _Moment, manifest: Manifest) -> _Stored:
        stored, like = manifest.tensors[moment.name], moment.kept[0]
        own = torch.empty(like.tensor.shape, dtype=getattr(torch, stored.dtype))
        part = replace(like, name=moment.name, tensor=own)
        scales_name = f"{moment.kind}.{SCALES}/{moment.segment}"
        if scales_name not in manifest.tensors:
            return _Stored(moment, [part], 0)
        shape = tuple(manifest.tensors[scales_name].shape)
        block = stored.shape[-1] // shape[-1]
        start, stop = part.offsets[-1] // block, -(-(part.offsets[-1] + own.shape[-1]) // block)
        scales = torch.empty(*own.shape[:-1], stop - start)
        blocks = Rectangle(scales_name, shape, (*part.offsets[:-1], start), scales)
        return _Stored(moment, [part, blocks], part.offsets[-1] - start * block)

    def values(self) -> Tensor:
        """Return the values, in the shape of the rectangle."""
        if len(self.parts) == 1:
            return self.parts[0].tensor
        codes, scales = (part.tensor for part in self.parts)
        block = self.parts[0].global_shape[-1] // self.parts[1].global_shape[-1]
        spread = scales.repeat_interleave(block, -1)[..., self.skipped :][..., : codes.shape[-1]]
        units = moments.code_table(not is_positive(self.moment.kind), codes.device)[codes.int()]
        return units * spread


def load_state(
    state: OptimizerState,
    manifest: Manifest,
    others: Iterable[Rectangle],
    options: OptimizerConfig,
    done: int,
) -> list[str]:
    """Fill weights, optimizer state and `others` from a checkpoint, and return what has been converted.

    An average of the weights that the checkpoint does not have is not filled.

    Args:
        options: of this run.
        done: number of updates of the weights before the checkpoint.

    Raises:
        DamagedError, CheckpointError: as `checkpoint.load`.
    """
    plain, kept = list(others), set[str]()
    kinds = {kind_of(name.partition("/")[0]) for name in manifest.tensors if "/" in name}
    for bucket in state.store.buckets:
        converted = list[_Moment]()
        for flat, offset in state.store.rectangles_in(bucket, bucket.start, bucket.stop):
            plain.append(bucket.rectangle(WEIGHT, bucket.master, flat, offset))
            for moment in _moments(state, bucket, flat, offset):
                if moment.kind == EMA and not manifest.has_averages:
                    continue
                kept.add(moment.kind)
                if moment.is_stored(manifest) or moment.kind == EMA:
                    plain += moment.kept
                else:
                    converted.append(moment)
        _convert(converted, manifest, kinds)
    checkpoint.load(manifest, plain)
    started = manifest.state.get("started", {})
    state.started = {
        kind: started.get(kind, 0) if kind in kinds else done
        for kind in sorted(kept - {EMA})
        if kind not in kinds or started.get(kind, 0)
    }
    before = from_dict(manifest.state["config"]).optimizer.moments
    notes = []
    if before != options.moments:
        notes.append(f"moments of the checkpoint in {before} are converted to {options.moments}")
    if new := ", ".join(sorted(kept - kinds - {EMA})):
        notes.append(f"the checkpoint is of another optimizer: {new} starts at zero, the rest carries on")
    return notes


def _convert(converted: Sequence[_Moment], manifest: Manifest, kinds: Collection[str]) -> None:
    """Fill the moments of a bucket that the checkpoint has otherwise, or not at all.

    Args:
        kinds: of state in the checkpoint.
    """
    for moment in converted:
        if moment.kind not in kinds:
            moment.write(None)
    stored = [_Stored.of(moment, manifest) for moment in converted if moment.kind in kinds]
    checkpoint.load(manifest, [part for each in stored for part in each.parts])
    for each in stored:
        each.moment.write(each.values())


def _moments(
    state: OptimizerState, bucket: BucketBuffers, flat: FlatRectangle, offset: int
) -> Iterator[_Moment]:
    """Yield the kinds of state of a rectangle; none if it is frozen."""
    if not bucket.layout.trainable:
        return
    span = state.span_at(bucket, offset + flat.start)
    for kind in dict.fromkeys(map(kind_of, span.state)):
        names = [name for name in span.state if kind_of(name) == kind]
        yield _Moment(kind, flat.segment.name, [span.rectangle(name, flat, offset) for name in names])
