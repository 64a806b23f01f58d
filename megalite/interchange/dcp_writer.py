"""Directories of torch.distributed.checkpoint, written by its own writer with one chunk in memory at a time.

torch's planner takes tensors that exist. This one takes chunks that are computed when they are written.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save


@dataclass(frozen=True)
class NewChunk:
    """A rectangle of a tensor.

    Attributes:
        values: computes it; it is contiguous.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    values: Callable[[], Tensor]


@dataclass(frozen=True)
class NewTensor:
    """A tensor with the chunks that cover it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: list[NewChunk]


class _LazyPlanner(DefaultSavePlanner):
    def __init__(self, tensors: Mapping[str, NewTensor], objects: Mapping[str, Any]):
        super().__init__()
        self._tensors, self._objects = tensors, objects

    def create_local_plan(self) -> SavePlan:
        items = [
            WriteItem(
                MetadataIndex(name, chunk.offsets, index),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)),
                    TensorProperties(dtype=tensor.dtype),
                    torch.Size(tensor.shape),
                ),
            )
            for name, tensor in self._tensors.items()
            for index, chunk in enumerate(tensor.chunks)
        ]
        items += [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in self._objects]
        # the keys of each name in a nested dictionary: there is one level
        self.plan = SavePlan(items, planner_data={name: (name,) for name in (*self._tensors, *self._objects)})
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        name = write_item.index.fqn
        if write_item.type == WriteItemType.BYTE_IO:
            data = io.BytesIO()
            torch.save(self._objects[name], data)
            return data
        tensor = self._tensors[name]
        chunk = tensor.chunks[write_item.index.index or 0]
        return chunk.values().to(tensor.dtype).reshape(chunk.sizes).contiguous()


def write_dcp(
    directory: Path, tensors: Mapping[str, NewTensor], objects: Mapping[str, Any] | None = None
) -> None:
    """Write a directory, on one process."""
    writer = FileSystemWriter(directory, single_file_per_rank=True, sync_files=True, thread_count=1)
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
        )
        save({}, storage_writer=writer, planner=_LazyPlanner(tensors, objects or {}), no_dist=True)
