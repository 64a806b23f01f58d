"""Writes and reads rectangles of global tensors with torch.distributed.checkpoint (DCP), which plans what each rank writes and reads.

DCP asks a value of the state dict for its chunks only if it is a tensor, so all rectangles of one global tensor are passed to it as one
wrapper subclass without data of its own.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from megalite.activity import Activity
from megalite.checkpoint.chunks import name_of
from megalite.checkpoint.errors import CheckpointError, DamagedError
from megalite.checkpoint.manifest import Manifest, StoredTensor
from megalite.checkpoint.storage import Reader, Writer
from megalite.mesh import MeshAxis
from megalite.parallel.spec import Rectangle

LARGEST_CHUNK = 64 << 20  # bytes; reading a part of a chunk reads and verifies all of it
NAMED_PROBLEMS = 5  # problems listed in a message


class _GlobalTensor(torch.Tensor):
    """A global tensor of which this process holds some rectangles. Implements only DCP's three protocol methods."""

    parts: list[Rectangle]

    @staticmethod
    def __new__(cls, parts: list[Rectangle]) -> _GlobalTensor:
        first = parts[0]
        made: _GlobalTensor = torch.Tensor._make_wrapper_subclass(cls, first.global_shape, dtype=first.tensor.dtype)
        made.parts = parts
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func} on a global tensor, which only describes what to store")

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, properties, self.size()))
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(part.offsets), part.tensor.size()) for part in self.parts]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The rectangle at an offset. The index counts this process's rectangles when loading, those of all ranks when saving."""
        if index.index is not None and index.index < len(self.parts) and torch.Size(self.parts[index.index].offsets) == index.offset:
            return self.parts[index.index].tensor
        return next(part.tensor for part in self.parts if torch.Size(part.offsets) == index.offset)


def _global_tensors(rectangles: Sequence[Rectangle]) -> dict[str, Tensor]:
    """One entry per global name. Empty rectangles are left out: their offset could equal that of another rectangle."""
    by_name: dict[str, list[Rectangle]] = {}
    for part in rectangles:
        if part.tensor.numel():
            by_name.setdefault(part.name, []).append(part)
    return {name: _GlobalTensor(parts) for name, parts in by_name.items()}


def _blocks(part: Rectangle) -> Iterator[Rectangle]:
    """A rectangle as chunks of at most `LARGEST_CHUNK` bytes, split along its first dimension of size > 1; views of its memory."""
    dim = next((dim for dim, size in enumerate(part.tensor.shape) if size > 1), None)
    if dim is None or part.tensor.nbytes <= LARGEST_CHUNK:
        yield part
        return
    start = part.offsets[dim]
    for block in part.tensor.split(max(1, LARGEST_CHUNK * part.tensor.shape[dim] // part.tensor.nbytes), dim):
        yield replace(part, offsets=(*part.offsets[:dim], start, *part.offsets[dim + 1 :]), tensor=block)
        start += block.shape[dim]


def _describe(shape: Sequence[int], dtype: torch.dtype) -> str:
    return f"{name_of(dtype)} {list(shape)}"


class _SavePlanner(DefaultSavePlanner):
    """Refuses plans that do not store every element exactly once: DCP drops a repeated chunk, and does not check one process's plan."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        first: dict[str, TensorWriteData] = {}
        holder: dict[tuple[str, torch.Size | None], int] = {}
        stored: Counter[str] = Counter()
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                name, offset, data = item.index.fqn, item.index.offset, item.tensor_data
                assert data is not None
                kinds = [_describe(each.size, each.properties.dtype) for each in (first.setdefault(name, data), data)]
                if kinds[0] != kinds[1]:
                    raise CheckpointError(f"{name} is {kinds[0]} and, on rank {rank}, {kinds[1]}")
                if (name, offset) in holder:
                    ranks = f"rank {holder[name, offset]} and by rank {rank}"
                    raise CheckpointError(f"{name} at {list(offset or ())} would be stored twice, by {ranks}")
                holder[name, offset] = rank
                stored[name] += prod(data.chunk.sizes)
        for name, data in first.items():
            if stored[name] != prod(data.size):
                raise CheckpointError(f"{name} has {prod(data.size)} elements, but the ranks hold {stored[name]}")
        return super().create_global_plan(all_plans)


class _LoadPlanner(DefaultLoadPlanner):
    """Reports every tensor that does not fit, with what was expected and found. With `convert`, any dtype fits."""

    def __init__(self, convert: bool):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.convert = convert

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        found = self.metadata.state_dict_metadata
        problems = []
        for name, tensor in self.state_dict.items():
            expected, entry = _describe(tensor.shape, tensor.dtype), found.get(name)
            stored = "nothing of that name"
            if isinstance(entry, TensorStorageMetadata):
                stored = _describe(entry.size, tensor.dtype if self.convert else entry.properties.dtype)
            if stored != expected:
                problems.append(f"{name}: expected {expected}, found {stored}")
        if problems:
            more = f"\n  … and {len(problems) - NAMED_PROBLEMS} more" if len(problems) > NAMED_PROBLEMS else ""
            raise CheckpointError("its tensors do not fit this model:\n  " + "\n  ".join(problems[:NAMED_PROBLEMS]) + more)
        return super().create_local_plan()


def write(directory: Path, rectangles: Sequence[Rectangle], world: MeshAxis, activity: Activity | None) -> dict[str, StoredTensor]:
    """Write every rank's rectangles to `directory` and sync them to disk; returns the tensors of all ranks on rank 0. Collective.

    activity: learns when this rank writes; None: a save in the background is not what the rank does.
    """
    blocks = [block for part in rectangles for block in _blocks(part)]
    planner = _SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    writer = Writer(directory, world.rank, activity)
    with _clear_errors():
        dcp_save(_global_tensors(blocks), storage_writer=writer, planner=planner, process_group=world.group, no_dist=world.group is None)
    return writer.tensors


def read(manifest: Manifest, rectangles: Sequence[Rectangle], convert: bool) -> None:
    """Fill the rectangles, see `checkpoint.load`. Not collective, so no rank waits for one that fails."""
    planner = _LoadPlanner(convert)
    with _clear_errors(f"could not load {manifest.directory}: "):
        dcp_load(_global_tensors(rectangles), storage_reader=Reader(manifest), planner=planner, no_dist=True)


@contextmanager
def _clear_errors(what: str = "") -> Iterator[None]:
    """Convert DCP's exception, which quotes every rank's traceback, to one line per rank; suppress its warning about missing groups."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as failure:
        errors = {rank: error for rank, (error, _) in failure.failures.items()}
        if damage := next((error for error in errors.values() if isinstance(error, DamagedError)), None):
            raise damage from None
        lines = [str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}" for error in errors.values()]
        named = lines if len(lines) == 1 else [f"rank {rank}: {line}" for rank, line in zip(errors, lines, strict=True)]
        raise CheckpointError(what + "\n".join(named)) from next(iter(errors.values()))
