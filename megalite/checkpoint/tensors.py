"""Writes and reads rectangles of global tensors: each rank its own file, with no more communication than one
message to rank 0.

torch.distributed.checkpoint is not used: importing it costs every rank 0.6 seconds of processor time.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from megalite.checkpoint.chunks import append, name_of
from megalite.checkpoint.errors import CheckpointError, reason
from megalite.checkpoint.manifest import Chunk, Manifest, StoredTensor
from megalite.mesh.mesh import Mesh
from megalite.parallel.collectives import after_meeting
from megalite.parallel.spec import Rectangle

LARGEST_CHUNK = 64 << 20  # bytes; reading a part of a chunk reads and verifies all of it
NAMED_PROBLEMS = 5  # problems listed in a message


@dataclass(frozen=True)
class _Written:
    """A chunk that a rank has written, and the global tensor that it belongs to."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunk: Chunk


Outcome = list[_Written] | str
"""What a rank has written, or why it could not."""


def write(directory: Path, rectangles: Sequence[Rectangle], mesh: Mesh) -> list[Outcome]:
    """Write this rank's rectangles to `directory` and sync them to disk; returns every rank's outcome on rank
    0. Collective."""
    own: Outcome
    world = mesh.saving
    try:
        own = _write_own(directory / f"rank_{world.rank:05d}.bin", rectangles)
    except Exception as error:  # the other ranks must not wait for this one
        own = reason(error)
    if world.group is None:
        return [own]
    import torch.distributed as dist

    found: list[Outcome] | None = [[]] * world.size if world.rank == 0 else None
    with after_meeting("the exchange of what to save", mesh, world):
        dist.gather_object(own, found, dst=world.ranks[0], group=world.group)
    return found or []


def _write_own(path: Path, rectangles: Sequence[Rectangle]) -> list[_Written]:
    """Write this rank's file, unless it has nothing to write. Rectangles of one tensor follow each other."""
    by_name: defaultdict[str, list[Rectangle]] = defaultdict(list)
    for part in rectangles:
        if part.tensor.numel():
            by_name[part.name] += _blocks(part)
    written: list[_Written] = []
    if by_name:
        with open(path, "wb") as file:
            for part in (part for parts in by_name.values() for part in parts):
                chunk = append(file, part.offsets, part.tensor)
                written.append(_Written(part.name, name_of(part.tensor.dtype), part.global_shape, chunk))
            file.flush()
            os.fsync(file.fileno())
    return written


def _blocks(part: Rectangle) -> Iterator[Rectangle]:
    """A rectangle as chunks of at most `LARGEST_CHUNK` bytes, split along its first dimension of size > 1;
    views of its memory."""
    dim = next((dim for dim, size in enumerate(part.tensor.shape) if size > 1), None)
    if dim is None or part.tensor.nbytes <= LARGEST_CHUNK:
        yield part
        return
    start = part.offsets[dim]
    for block in part.tensor.split(max(1, LARGEST_CHUNK * part.tensor.shape[dim] // part.tensor.nbytes), dim):
        yield replace(part, offsets=(*part.offsets[:dim], start, *part.offsets[dim + 1 :]), tensor=block)
        start += block.shape[dim]


def merged(outcomes: Sequence[Outcome]) -> dict[str, StoredTensor]:
    """The tensors that all ranks have written. Raises CheckpointError if one could not, or if they are not
    every element, once."""
    if errors := {rank: each for rank, each in enumerate(outcomes) if isinstance(each, str)}:
        raise CheckpointError(
            "\n".join(f"rank {rank}: {error}" if len(errors) > 1 else error for rank, error in errors.items())
        )
    stored: dict[str, StoredTensor] = {}
    holder: dict[tuple[str, tuple[int, ...]], int] = {}
    elements: Counter[str] = Counter()
    for rank, written in enumerate(outcomes):
        for each in written:
            assert isinstance(each, _Written)
            tensor, at = (
                stored.setdefault(each.name, StoredTensor(each.dtype, each.shape, [])),
                (each.name, each.chunk.offsets),
            )
            kinds = [
                _describe(shape, dtype)
                for shape, dtype in ((tensor.shape, tensor.dtype), (each.shape, each.dtype))
            ]
            if kinds[0] != kinds[1]:
                raise CheckpointError(f"{each.name} is {kinds[0]} and, on rank {rank}, {kinds[1]}")
            if at in holder:
                ranks = f"rank {holder[at]} and by rank {rank}"
                raise CheckpointError(
                    f"{each.name} at {list(each.chunk.offsets)} would be stored twice, by {ranks}"
                )
            holder[at] = rank
            elements[each.name] += prod(each.chunk.sizes)
            tensor.chunks.append(each.chunk)
    for name, tensor in stored.items():
        if elements[name] != prod(tensor.shape):
            raise CheckpointError(
                f"{name} has {prod(tensor.shape)} elements, but the ranks hold {elements[name]}"
            )
        _check_apart(name, tensor)
    return stored


def _check_apart(name: str, tensor: StoredTensor) -> None:
    """Raise CheckpointError if a chunk leaves the tensor, or overlaps another one."""
    open_chunks: list[Chunk] = []  # that may reach the rows of the next one
    for chunk in sorted(tensor.chunks, key=lambda chunk: chunk.offsets):
        ends = (low + size for low, size in zip(chunk.offsets, chunk.sizes, strict=True))
        if any(end > whole for end, whole in zip(ends, tensor.shape, strict=True)):
            raise CheckpointError(
                f"{name} has the shape {list(tensor.shape)}, and a part {list(chunk.sizes)} at "
                f"{list(chunk.offsets)}"
            )
        open_chunks = [
            each
            for each in open_chunks
            if not chunk.offsets or each.offsets[0] + each.sizes[0] > chunk.offsets[0]
        ]
        for other in open_chunks:
            if _common(chunk.offsets, chunk.sizes, other.offsets, other.sizes) is not None:
                raise CheckpointError(
                    f"{name} has overlapping parts, at {list(other.offsets)} and at {list(chunk.offsets)}"
                )
        open_chunks.append(chunk)


def _common(
    offsets: Sequence[int], sizes: Sequence[int], others: Sequence[int], other_sizes: Sequence[int]
) -> list[tuple[int, int]] | None:
    """First and end, in each dimension, of what two rectangles share; None if they share nothing."""
    shared = [
        (max(low, other), min(low + size, other + other_size))
        for low, size, other, other_size in zip(offsets, sizes, others, other_sizes, strict=True)
    ]
    return shared if all(low < end for low, end in shared) else None


def _describe(shape: Sequence[int], dtype: str) -> str:
    return f"{dtype} {list(shape)}"


def read(manifest: Manifest, rectangles: Sequence[Rectangle], convert: bool) -> None:
    """Fill the rectangles, see `checkpoint.load`. Not collective, so no rank waits for one that fails."""
    _check_fit(manifest, rectangles, convert)
    # a target, and its place in the chunk
    wanted: defaultdict[Chunk, list[tuple[Tensor, tuple[slice, ...]]]] = defaultdict(list)
    dtypes: dict[Chunk, torch.dtype] = {}
    for part in rectangles:
        if not part.tensor.numel():
            continue
        stored = manifest.tensors[part.name]
        for chunk in stored.chunks:
            shared = _common(part.offsets, part.tensor.shape, chunk.offsets, chunk.sizes)
            if shared is not None:
                dtypes[chunk] = getattr(torch, stored.dtype)
                wanted[chunk].append(
                    (part.tensor.detach()[_within(shared, part.offsets)], _within(shared, chunk.offsets))
                )
    for chunk, data in manifest.read(wanted):
        values = torch.from_numpy(data).view(dtypes[chunk]).view(chunk.sizes)
        for target, place in wanted[chunk]:
            target.copy_(values[place])


def _within(shared: Sequence[tuple[int, int]], offsets: Sequence[int]) -> tuple[slice, ...]:
    """A rectangle of a global tensor as an index into one that begins at `offsets`."""
    return tuple(
        slice(low - offset, end - offset) for (low, end), offset in zip(shared, offsets, strict=True)
    )


def _check_fit(manifest: Manifest, rectangles: Sequence[Rectangle], convert: bool) -> None:
    """Raise CheckpointError naming the tensors that the checkpoint does not have in this shape and, unless
    `convert`, dtype."""
    problems: dict[str, str] = {}
    for part in rectangles:
        dtype = name_of(part.tensor.dtype)
        expected, stored = _describe(part.global_shape, dtype), manifest.tensors.get(part.name)
        found = (
            "nothing of that name"
            if stored is None
            else _describe(stored.shape, dtype if convert else stored.dtype)
        )
        if found != expected and part.tensor.numel():
            problems.setdefault(part.name, f"{part.name}: expected {expected}, found {found}")
    if problems:
        more = f"\n  … and {len(problems) - NAMED_PROBLEMS} more" if len(problems) > NAMED_PROBLEMS else ""
        listed = "\n  ".join(list(problems.values())[:NAMED_PROBLEMS])
        raise CheckpointError(
            f"could not load {manifest.directory}: its tensors do not fit this model:\n  {listed}{more}"
        )
