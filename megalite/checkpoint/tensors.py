"""Reading and writing of rectangles of global tensors.

Each rank writes its own file. The only communication is one message to rank 0.

torch.distributed.checkpoint is not used: importing it costs every rank 0.6 seconds of processor time.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from megalite.checkpoint.checksummed_chunks import Chunk, append_chunk, dtype_name
from megalite.checkpoint.errors import CheckpointError, listing, reason
from megalite.checkpoint.manifest import Manifest, StoredTensor
from megalite.mesh.mesh import Mesh, MeshAxis
from megalite.parallel.collectives import after_meeting
from megalite.parallel.spec import Rectangle

LARGEST_CHUNK = 64 << 20  # bytes; reading a part of a chunk reads and verifies all of it


@dataclass(frozen=True)
class _Written:
    """A chunk written by a rank, with the global tensor that it belongs to."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunk: Chunk


Outcome = list[_Written] | str
"""The chunks written by a rank, or the reason for its failure."""


def write(
    directory: Path,
    rectangles: Sequence[Rectangle],
    mesh: Mesh,
    suffix: str = "",
    over: MeshAxis | None = None,
) -> list[Outcome]:
    """Write this rank's rectangles to `directory` and sync them to disk.

    Collective over `mesh.saving`. Return the outcomes of all ranks on rank 0.

    Args:
        suffix: of the names of the files.
        over: another axis of all ranks, in place of `mesh.saving`.
    """
    own: Outcome
    world = over or mesh.saving
    try:
        own = _write_own(directory / file_name(world.rank, suffix), rectangles)
    except Exception as error:  # the other ranks must not wait for this one
        own = reason(error)
    if world.group is None:
        return [own]
    import torch.distributed as dist

    outcomes: list[Outcome] | None = [[]] * world.size if world.rank == 0 else None
    with after_meeting("the exchange of what to save", mesh, world):
        dist.gather_object(own, outcomes, dst=world.ranks[0], group=world.group)
    return outcomes or []


def file_name(rank: int, suffix: str = "") -> str:
    """Return the name of a rank's file."""
    return f"rank_{rank:05d}{suffix}.bin"


def rank_of(name: str) -> int:
    """Return the rank that has written a file without a suffix."""
    return int(name.removeprefix("rank_").removesuffix(".bin"))


def _write_own(path: Path, rectangles: Sequence[Rectangle]) -> list[_Written]:
    """Write this rank's file, unless it has nothing to write. Rectangles of one tensor are adjacent."""
    by_name: defaultdict[str, list[Rectangle]] = defaultdict(list)
    for part in rectangles:
        if part.tensor.numel():
            by_name[part.name] += _blocks(part)
    blocks = list(chain.from_iterable(by_name.values()))
    written: list[_Written] = []
    if blocks:
        path.parent.mkdir(parents=True, exist_ok=True)  # on a node whose disk rank 0 does not see
        with open(path, "wb") as file:
            for block in blocks:
                chunk = append_chunk(file, block.offsets, block.tensor)
                written.append(
                    _Written(block.name, dtype_name(block.tensor.dtype), block.global_shape, chunk)
                )
            file.flush()
            os.fsync(file.fileno())
    return written


def _blocks(part: Rectangle) -> Iterator[Rectangle]:
    """Split a rectangle along its first dimension of size > 1.

    The blocks are views of its memory with at most `LARGEST_CHUNK` bytes.
    """
    dim = next((dim for dim, size in enumerate(part.tensor.shape) if size > 1), None)
    if dim is None or part.tensor.nbytes <= LARGEST_CHUNK:
        yield part
        return
    start = part.offsets[dim]
    length = max(1, LARGEST_CHUNK * part.tensor.shape[dim] // part.tensor.nbytes)
    for block in part.tensor.split(length, dim):
        yield replace(part, offsets=(*part.offsets[:dim], start, *part.offsets[dim + 1 :]), tensor=block)
        start += block.shape[dim]


def merged(outcomes: Sequence[Outcome]) -> dict[str, StoredTensor]:
    """Return the tensors that all ranks have written.

    Raises CheckpointError if a rank could not write, or if the chunks do not cover every element once.
    """
    errors = {rank: outcome for rank, outcome in enumerate(outcomes) if isinstance(outcome, str)}
    if errors:
        lines = [f"rank {rank}: {error}" if len(errors) > 1 else error for rank, error in errors.items()]
        raise CheckpointError("\n".join(lines))
    stored: dict[str, StoredTensor] = {}
    writers: dict[tuple[str, tuple[int, ...]], int] = {}  # name and offsets of a chunk → its rank
    elements: Counter[str] = Counter()
    for rank, outcome in enumerate(outcomes):
        for written in outcome:
            assert isinstance(written, _Written)
            name, chunk = written.name, written.chunk
            tensor = stored.setdefault(name, StoredTensor(written.dtype, written.shape, []))
            expected, actual = _describe(tensor.shape, tensor.dtype), _describe(written.shape, written.dtype)
            if actual != expected:
                raise CheckpointError(
                    f"{name} differs between ranks: expected {expected}, but got {actual} on rank {rank}"
                )
            place = (name, chunk.offsets)
            if place in writers:
                ranks = f"rank {writers[place]} and by rank {rank}"
                raise CheckpointError(f"{name} at {list(chunk.offsets)} is stored twice, by {ranks}")
            writers[place] = rank
            elements[name] += prod(chunk.sizes)
            tensor.chunks.append(chunk)
    for name, tensor in stored.items():
        if elements[name] != prod(tensor.shape):
            raise CheckpointError(
                f"{name} has {prod(tensor.shape)} elements, but the ranks stored {elements[name]}"
            )
        _check_apart(name, tensor)
    return stored


def _check_apart(name: str, tensor: StoredTensor) -> None:
    """Raise CheckpointError if a chunk leaves the tensor, or overlaps another one."""
    open_chunks: list[Chunk] = []  # that may reach the rows of the next one
    for chunk in sorted(tensor.chunks, key=lambda chunk: chunk.offsets):
        bounds = zip(chunk.offsets, chunk.sizes, tensor.shape, strict=True)
        if any(offset + size > whole for offset, size, whole in bounds):
            raise CheckpointError(
                f"{name} has a part of shape {list(chunk.sizes)} at {list(chunk.offsets)}, outside its "
                f"shape {list(tensor.shape)}"
            )
        if chunk.offsets:
            row = chunk.offsets[0]
            open_chunks = [other for other in open_chunks if other.offsets[0] + other.sizes[0] > row]
        for other in open_chunks:
            if _common(chunk.offsets, chunk.sizes, other.offsets, other.sizes) is not None:
                raise CheckpointError(
                    f"{name} has overlapping parts at {list(other.offsets)} and {list(chunk.offsets)}"
                )
        open_chunks.append(chunk)


def _common(
    offsets: Sequence[int], sizes: Sequence[int], others: Sequence[int], other_sizes: Sequence[int]
) -> list[tuple[int, int]] | None:
    """Return the (start, end) of the overlap of two rectangles in each dimension, or None without overlap."""
    shared = [
        (max(low, other), min(low + size, other + other_size))
        for low, size, other, other_size in zip(offsets, sizes, others, other_sizes, strict=True)
    ]
    return shared if all(low < end for low, end in shared) else None


def _describe(shape: Sequence[int], dtype: str) -> str:
    return f"{dtype} {list(shape)}"


def read(manifest: Manifest, rectangles: Sequence[Rectangle], convert: bool) -> None:
    """Fill the rectangles (`checkpoint.load`). Not collective, so no rank waits for one that fails."""
    _check_fit(manifest, rectangles, convert)
    # chunk → views to fill, and the place of each in the chunk
    targets: defaultdict[Chunk, list[tuple[Tensor, tuple[slice, ...]]]] = defaultdict(list)
    dtypes: dict[Chunk, torch.dtype] = {}
    for part in rectangles:
        if not part.tensor.numel():
            continue
        stored = manifest.tensors[part.name]
        for chunk in stored.chunks:
            shared = _common(part.offsets, part.tensor.shape, chunk.offsets, chunk.sizes)
            if shared is not None:
                dtypes[chunk] = getattr(torch, stored.dtype)
                view = part.tensor.detach()[_within(shared, part.offsets)]
                targets[chunk].append((view, _within(shared, chunk.offsets)))
    for chunk, data in manifest.read(targets):
        values = torch.from_numpy(data).view(dtypes[chunk]).view(chunk.sizes)
        for target, place in targets[chunk]:
            target.copy_(values[place])


def _within(shared: Sequence[tuple[int, int]], offsets: Sequence[int]) -> tuple[slice, ...]:
    """Return a rectangle of a global tensor as an index into one that begins at `offsets`."""
    bounds = zip(shared, offsets, strict=True)
    return tuple(slice(low - offset, end - offset) for (low, end), offset in bounds)


def _check_fit(manifest: Manifest, rectangles: Sequence[Rectangle], convert: bool) -> None:
    """Raise CheckpointError for tensors that the checkpoint does not contain in this shape or dtype.

    With `convert`, the dtype may differ.
    """
    problems: dict[str, str] = {}
    for part in rectangles:
        dtype, stored = dtype_name(part.tensor.dtype), manifest.tensors.get(part.name)
        expected = _describe(part.global_shape, dtype)
        if stored is None:
            actual = "no such tensor"
        else:
            actual = _describe(stored.shape, dtype if convert else stored.dtype)
        if actual != expected and part.tensor.numel():
            problems.setdefault(part.name, f"{part.name}: expected {expected}, found {actual}")
    if problems:
        raise CheckpointError(
            f"failed to load {manifest.directory}: its tensors do not match the "
            f"model:{listing(list(problems.values()))}"
        )
