"""Directories of torch.distributed.checkpoint (DCP), read chunk by chunk.

    .metadata         a pickle: every tensor with its chunks, and the file and bytes of each chunk
    __0_0.distcp      chunks one after another, each as torch.save writes it

torch's own reader unpickles .metadata without restriction; here it becomes inert records.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint import CheckpointError
from megalite.interchange.inert_pickles import load_metadata, load_pt

METADATA = ".metadata"
KEPT = 256 << 20  # bytes of chunks that stay in memory: neighboring tensors often share one


@dataclass(frozen=True)
class StoredChunk:
    """A rectangle of a tensor, and its bytes in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class DcpTensor:
    """A tensor of a directory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[StoredChunk, ...]


class DcpDirectory:
    """A DCP directory.

    Attributes:
        tensors: name → tensor.
        objects: names of pickled objects.

    Raises:
        CheckpointError: it cannot be read.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        path = directory / METADATA
        metadata = load_metadata(path)
        try:
            storage = {(_name(index), _offset(index)): info for index, info in metadata.storage_data.items()}
            self.tensors: dict[str, DcpTensor] = {}
            self._objects: dict[str, Any] = {}
            for name, entry in metadata.state_dict_metadata.items():
                if hasattr(entry, "chunks"):
                    self.tensors[name] = _tensor(name, entry, storage)
                else:
                    self._objects[name] = storage.get((name, None))
        except (AttributeError, TypeError, KeyError, IndexError) as error:
            raise CheckpointError(
                f"{path} is damaged: expected the metadata of torch.distributed.checkpoint, found "
                f"{type(metadata).__name__} ({type(error).__name__}: {error})"
            ) from None
        for name, tensor in self.tensors.items():
            _check_cover(path, name, tensor)
        self._cache: OrderedDict[StoredChunk, Tensor] = OrderedDict()

    @property
    def objects(self) -> list[str]:
        return list(self._objects)

    def read_object(self, name: str) -> Any:
        """Return a pickled object, with inert records in place of classes."""
        info = self._objects[name]
        chunk = StoredChunk((), (), str(info.relative_path), int(info.offset), int(info.length))
        return load_pt(self._bytes(chunk), f"{self.directory / chunk.file} ({name})")

    def read(self, name: str, lead: Sequence[int] = ()) -> Tensor:
        """Return a tensor, or the part at some indices of its first dimensions."""
        tensor = self.tensors[name]
        rest = tensor.shape[len(lead) :]
        whole = torch.empty(rest, dtype=tensor.dtype)
        for chunk in tensor.chunks:
            inside = all(
                low <= index < low + size
                for index, low, size in zip(lead, chunk.offsets, chunk.sizes, strict=False)
            )
            if not inside:
                continue
            values = self._chunk(name, chunk)
            for index, low in zip(lead, chunk.offsets, strict=False):
                values = values[index - low]
            place = tuple(
                slice(low, low + size)
                for low, size in zip(chunk.offsets[len(lead) :], chunk.sizes[len(lead) :], strict=True)
            )
            whole[place] = values
        return whole

    def _chunk(self, name: str, chunk: StoredChunk) -> Tensor:
        if chunk in self._cache:
            self._cache.move_to_end(chunk)
            return self._cache[chunk]
        where = f"{self.directory / chunk.file} ({name})"
        values = load_pt(self._bytes(chunk), where)
        if not isinstance(values, Tensor) or tuple(values.shape) != chunk.sizes:
            actual = f"{list(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
            raise CheckpointError(
                f"{where} is damaged: expected a tensor {list(chunk.sizes)}, found {actual}"
            )
        if values.dtype != self.tensors[name].dtype:
            raise CheckpointError(
                f"{where} is damaged: expected {self.tensors[name].dtype}, found {values.dtype}"
            )
        self._cache[chunk] = values
        while len(self._cache) > 1 and sum(each.nbytes for each in self._cache.values()) > KEPT:
            self._cache.popitem(last=False)
        return values

    def _bytes(self, chunk: StoredChunk) -> io.BytesIO:
        path = self.directory / chunk.file
        try:
            with open(path, "rb") as file:
                file.seek(chunk.start)
                data = file.read(chunk.length)
        except OSError as error:
            raise CheckpointError(
                f"Could not read {path}: {error.strerror}. Check that the copy is complete."
            ) from None
        if len(data) != chunk.length:
            raise CheckpointError(
                f"{path} is truncated: expected {chunk.start + chunk.length:,} bytes, found "
                f"{path.stat().st_size:,}"
            )
        return io.BytesIO(data)


def _name(index: Any) -> str:
    return str(index.fqn)


def _offset(index: Any) -> tuple[int, ...] | None:
    offset = getattr(index, "offset", None)
    return None if offset is None else tuple(int(each) for each in offset)


def _tensor(name: str, entry: Any, storage: Mapping[Any, Any]) -> DcpTensor:
    properties = entry.properties
    # a tuple: TensorProperties keep their state without names
    dtype = properties.state[0] if isinstance(properties.state, tuple) else properties.dtype
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} has no dtype")
    chunks = []
    for chunk in entry.chunks:
        offsets = tuple(int(each) for each in chunk.offsets)
        info = storage[name, offsets]
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(
                f"{name} is stored with {info.transform_descriptors}, which is not supported. Save the "
                "checkpoint "
                "without transforms."
            )
        file = str(info.relative_path)
        if Path(file).is_absolute() or ".." in Path(file).parts:
            raise CheckpointError(f"{name} is stored in {file}, which is outside of the directory")
        sizes = tuple(int(each) for each in chunk.sizes)
        chunks.append(StoredChunk(offsets, sizes, file, int(info.offset), int(info.length)))
    return DcpTensor(tuple(int(each) for each in entry.size), dtype, tuple(chunks))


def _check_cover(path: Path, name: str, tensor: DcpTensor) -> None:
    """Raise CheckpointError if the chunks of a tensor do not have its number of elements."""
    total = torch.Size(tensor.shape).numel()
    stored = sum(torch.Size(chunk.sizes).numel() for chunk in tensor.chunks)
    if stored != total:
        raise CheckpointError(
            f"{path} is incomplete: {name} {list(tensor.shape)} has {total:,} elements, but its chunks have "
            f"{stored:,}"
        )
