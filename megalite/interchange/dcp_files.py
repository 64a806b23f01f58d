"""Directories of torch.distributed.checkpoint (DCP), read chunk by chunk.

    .metadata         a pickle: every tensor with its chunks, and the file and bytes of each chunk
    __0_0.distcp      chunks one after another, each as torch.save writes it

torch's own reader unpickles .metadata without restriction; here it becomes inert records.
"""

from __future__ import annotations

import io
from bisect import bisect_right
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
            self._objects: dict[str, StoredChunk] = {}
            for name, entry in metadata.state_dict_metadata.items():
                if hasattr(entry, "chunks"):
                    self.tensors[name] = _tensor(name, entry, storage)
                else:
                    self._objects[name] = _stored(name, (), (), storage[name, None])
        except (AttributeError, TypeError, KeyError, IndexError) as error:
            raise CheckpointError(
                f"{path} is damaged: expected the metadata of torch.distributed.checkpoint, found "
                f"{type(metadata).__name__} ({type(error).__name__}: {error})"
            ) from None
        for name, tensor in self.tensors.items():
            _check_cover(path, name, tensor)
        self._cache: OrderedDict[StoredChunk, Tensor] = OrderedDict()
        self._ordered: dict[str, list[StoredChunk]] = {}

    @property
    def objects(self) -> list[str]:
        return list(self._objects)

    def read_object(self, name: str) -> Any:
        """Return a pickled object, with inert records in place of classes."""
        chunk = self._objects[name]
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

    def read_range(self, name: str, start: int, count: int) -> Tensor:
        """Return consecutive elements of a tensor of one dimension."""
        tensor = self.tensors[name]
        whole, stop = torch.empty(count, dtype=tensor.dtype), start + count
        chunks = self._in_order(name)
        for chunk in chunks[max(0, bisect_right(chunks, start, key=lambda each: each.offsets[0]) - 1) :]:
            (low,), (size,) = chunk.offsets, chunk.sizes
            if low >= stop:
                break
            first, last = max(start, low), min(stop, low + size)
            if first < last:
                whole[first - start : last - start] = self._chunk(name, chunk)[first - low : last - low]
        return whole

    def _in_order(self, name: str) -> list[StoredChunk]:
        """Return the chunks of a tensor of one dimension by their offsets."""
        if name not in self._ordered:
            self._ordered[name] = sorted(self.tensors[name].chunks, key=lambda chunk: chunk.offsets)
        return self._ordered[name]

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
        chunks.append(_stored(name, offsets, tuple(int(each) for each in chunk.sizes), info))
    return DcpTensor(tuple(int(each) for each in entry.size), dtype, tuple(chunks))


def _stored(name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], info: Any) -> StoredChunk:
    """Return where a chunk or an object is. Raises CheckpointError if that is not in the directory."""
    file, start, length = str(info.relative_path), int(info.offset), int(info.length)
    if Path(file).is_absolute() or ".." in Path(file).parts:
        raise CheckpointError(f"{name} is stored in {file}, which is outside of the directory")
    if start < 0 or length < 0:
        raise CheckpointError(f"{name} is stored in {file}, in {length:,} bytes from byte {start:,} on")
    return StoredChunk(offsets, sizes, file, start, length)


def _check_cover(path: Path, name: str, tensor: DcpTensor) -> None:
    """Raise CheckpointError if the chunks of a tensor do not have each of its elements once."""
    shape = tensor.shape
    for chunk in tensor.chunks:
        sides = zip(chunk.offsets, chunk.sizes, shape, strict=False)
        if not (
            len(chunk.offsets) == len(chunk.sizes) == len(shape)
            and all(low >= 0 <= size and low + size <= end for low, size, end in sides)
        ):
            raise CheckpointError(
                f"{path} is damaged: {name} {list(shape)} has a chunk {_rectangle(chunk)}, which is not in it"
            )
    if both := _overlapping(tensor.chunks):
        raise CheckpointError(
            f"{path} is damaged: the chunks {_rectangle(both[0])} and {_rectangle(both[1])} of {name} overlap"
        )
    total = torch.Size(shape).numel()
    stored = sum(torch.Size(chunk.sizes).numel() for chunk in tensor.chunks)
    if stored != total:
        raise CheckpointError(
            f"{path} is incomplete: {name} {list(shape)} has {total:,} elements, but its chunks have "
            f"{stored:,}"
        )


def _overlapping(chunks: Sequence[StoredChunk]) -> tuple[StoredChunk, StoredChunk] | None:
    """Return two chunks with a common element, or None."""
    dims = range(len(chunks[0].offsets)) if chunks else range(0)
    # along the dimension that most chunks divide, few are open at a time
    axis = max(dims, key=lambda dim: len({chunk.offsets[dim] for chunk in chunks}), default=None)
    if axis is None:
        return (chunks[0], chunks[1]) if len(chunks) > 1 else None
    open_ones = list[StoredChunk]()
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[axis]):
        open_ones = [one for one in open_ones if one.offsets[axis] + one.sizes[axis] > chunk.offsets[axis]]
        for one in open_ones:
            sides = zip(one.offsets, one.sizes, chunk.offsets, chunk.sizes, strict=True)
            if all(max(low, other) < min(low + size, other + width) for low, size, other, width in sides):
                return one, chunk
        open_ones.append(chunk)
    return None


def _rectangle(chunk: StoredChunk) -> str:
    sides = zip(chunk.offsets, chunk.sizes, strict=False)
    return f"[{', '.join(f'{low}:{low + size}' for low, size in sides)}]"
