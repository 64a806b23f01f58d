"""Storage for torch.distributed.checkpoint (DCP): raw bytes, one file per rank, with checksums and without pickle."""

from __future__ import annotations

import os
from collections import defaultdict
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from megalite.activity import Activity
from megalite.checkpoint.chunks import append, name_of
from megalite.checkpoint.manifest import Chunk, Manifest, StoredTensor


class _Plain:
    """DCP's storage methods that leave plans unchanged."""

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: Any) -> Any:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class Writer(_Plain, StorageWriter):
    """Writes this rank's file directly from the tensors' memory. `tensors` has those of all ranks, on rank 0 after `finish`."""

    def __init__(self, directory: Path, rank: int, activity: Activity | None):
        self.path, self.activity = directory / f"rank_{rank:05d}.bin", activity
        self.tensors: dict[str, StoredTensor] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        if plan.items:
            with self.activity.working() if self.activity else nullcontext(), open(self.path, "wb") as file:
                for item in plan.items:
                    assert item.tensor_data is not None and item.index.offset is not None
                    part = planner.resolve_data(item)
                    assert isinstance(part, Tensor)
                    chunk = append(file, tuple(item.index.offset), part)
                    results.append(WriteResult(item.index, chunk.bytes, chunk))
                file.flush()
                os.fsync(file.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        for result in chain.from_iterable(results):
            name = result.index.fqn
            entry = metadata.state_dict_metadata[name]
            assert isinstance(entry, TensorStorageMetadata)
            stored = self.tensors.setdefault(name, StoredTensor(name_of(entry.properties.dtype), tuple(entry.size), []))
            stored.chunks.append(result.storage_data)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...


class Reader(_Plain, StorageReader):
    """Reads and verifies whole chunks, since a checksum covers a whole chunk, and copies the parts that are needed."""

    def __init__(self, manifest: Manifest):
        self.manifest = manifest
        self._chunks = {
            MetadataIndex(name, torch.Size(chunk.offsets)): chunk for name, tensor in manifest.tensors.items() for chunk in tensor.chunks
        }

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata({name: _description(tensor) for name, tensor in self.manifest.tensors.items()})

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        wanted: defaultdict[Chunk, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            wanted[self._chunks[item.storage_index]].append(item)
        for chunk, data in self.manifest.read(wanted):
            dtype = getattr(torch, self.manifest.tensors[wanted[chunk][0].storage_index.fqn].dtype)
            stored = torch.from_numpy(data).view(dtype).view(chunk.sizes)
            for item in wanted[chunk]:
                part = tuple(slice(low, low + size) for low, size in zip(item.storage_offsets, item.lengths, strict=True))
                target = planner.resolve_tensor(item).detach()
                planner.commit_tensor(item, target.copy_(stored[part]))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...


def _description(tensor: StoredTensor) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in tensor.chunks]
    return TensorStorageMetadata(TensorProperties(dtype=getattr(torch, tensor.dtype)), torch.Size(tensor.shape), chunks)
