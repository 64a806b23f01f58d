"""The manifest of a checkpoint: its state, and the file, bytes and checksum of every part of every tensor.

    {"format": 1, "state": {…}, "files": {"rank_00000.bin": 128}, "tensors": {NAME: {"dtype": "float32",
    "shape": [8, 4], "chunks": [
     {"offsets": [0, 0], "sizes": [8, 4], "file": "rank_00000.bin", "offset": 0, "bytes": 128, "crc32c":
     "8a9136aa"}]}}, "crc32c": "1b9ca2d7"}

A chunk is a rectangle, row-major. Each is padded with zeros to a multiple of 128 bytes, which its checksum
includes, and the next follows: every byte of a file is covered by a checksum. The last checksum is that of
all text before it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from megalite.checkpoint.errors import CheckpointError, damaged

MANIFEST = "manifest.json"
FORMAT = 1
# names of weights, and of their averages (`train.ema_decay`), start with these
WEIGHT, EMA = "weight/", "ema/"
ALIGNMENT = 128  # bytes
_END = ', "crc32c": "%08x"}\n'


def crc32c(*parts: bytes | NDArray[np.uint8]) -> int:
    """The CRC-32C (Castagnoli polynomial, for which CPUs have an instruction) of the concatenated parts."""
    import google_crc32c  # costs 30 ms, and only saves and loads need it

    value = 0
    for part in parts:
        value = google_crc32c.extend(value, part)
    return value


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a global tensor and its place in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    offset: int
    bytes: int
    crc32c: str

    @property
    def extent(self) -> int:
        """Number of bytes, padding included."""
        return -(-self.bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class StoredTensor:
    dtype: str  # torch's name, for example float32
    shape: tuple[int, ...]
    chunks: list[Chunk]


@dataclass(frozen=True)
class Manifest:
    """A checkpoint to read: `state` as saved, tensors by global name, files with their sizes in bytes."""

    directory: Path
    state: dict[str, Any]
    tensors: dict[str, StoredTensor]
    files: dict[str, int]

    @staticmethod
    def of(directory: Path) -> Manifest:
        """Read the manifest of a directory. Raises DamagedError, or CheckpointError if its format is another
        version's."""
        path = directory / MANIFEST
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise damaged(path, "a file", error.strerror or "none") from None
        size = len(_END % 0)
        end, found = (_END % crc32c(raw[:-size])).encode(), raw[-size:]
        if found != end:
            raise damaged(path, f"{end!r} at the end of its {len(raw):,} bytes", repr(found))
        content = json.loads(raw)
        if content["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has format {content['format']}, and this version of megalite reads format {FORMAT}"
            )
        tensors = {
            name: StoredTensor(
                entry["dtype"], tuple(entry["shape"]), [_chunk(**chunk) for chunk in entry["chunks"]]
            )
            for name, entry in content["tensors"].items()
        }
        return Manifest(directory, content["state"], tensors, content["files"])

    @property
    def has_averages(self) -> bool:
        """Whether it holds an average of the weights."""
        return any(name.startswith(EMA) for name in self.tensors)

    def averaged(self) -> Manifest:
        """The same with the averages in place of the weights; a frozen weight, which has none, stays. Raises
        CheckpointError if there are no averages."""
        if not self.has_averages:
            raise CheckpointError(
                f"{self.directory} has no average of the weights: train.ema_decay was not set. Leave out "
                "--ema."
            )
        averages = {
            WEIGHT + name.removeprefix(EMA): each
            for name, each in self.tensors.items()
            if name.startswith(EMA)
        }
        return replace(self, tensors={**self.tensors, **averages})

    def chunks(self) -> Iterator[Chunk]:
        for tensor in self.tensors.values():
            yield from tensor.chunks

    def read(self, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, NDArray[np.uint8]]]:
        """Each chunk with its bytes, verified; file by file, one chunk in memory at a time. Raises
        DamagedError."""
        for name, own in groupby(
            sorted(chunks, key=lambda chunk: (chunk.file, chunk.offset)), key=lambda chunk: chunk.file
        ):
            with self._opened(name) as file:
                for chunk in own:
                    yield chunk, self._read(file, chunk)

    def _read(self, file: BinaryIO, chunk: Chunk) -> NDArray[np.uint8]:
        data = np.empty(chunk.extent, np.uint8)
        file.seek(chunk.offset)
        file.readinto(data)  # type: ignore[attr-defined]
        found = f"{crc32c(data):08x}"
        if found != chunk.crc32c:
            place = f"bytes {chunk.offset:,} to {chunk.offset + chunk.extent:,}"
            raise damaged(self.directory / chunk.file, f"checksum {chunk.crc32c} of {place}", found)
        return data[: chunk.bytes]

    @contextmanager
    def _opened(self, name: str) -> Iterator[BinaryIO]:
        """Open a file and check its size. Raises DamagedError, also for read errors of the disk."""
        path, expected = self.directory / name, f"{self.files[name]:,} bytes"
        try:
            with open(path, "rb") as file:
                found = path.stat().st_size
                if found != self.files[name]:
                    raise damaged(path, expected, f"{found:,}")
                yield file
        except OSError as error:
            raise damaged(path, expected, error.strerror or str(error)) from None

    def check_files(self) -> None:
        """Raise DamagedError if a file is missing or has another size. Reads no data."""
        for name in self.files:
            with self._opened(name):
                pass

    def verify(self, rank: int = 0, size: int = 1) -> int:
        """Verify the rank-th of `size` shares of all bytes and return the number of bytes of the share.
        Raises DamagedError."""
        self.check_files()
        own = sorted(self.chunks(), key=lambda chunk: (chunk.file, chunk.offset))[rank::size]
        return sum(chunk.extent for chunk, _ in self.read(own))


def encode(state: dict[str, Any], tensors: dict[str, StoredTensor]) -> str:
    """The text of a manifest."""
    entries = {
        name: {**vars(tensor), "chunks": [vars(chunk) for chunk in tensor.chunks]}
        for name, tensor in tensors.items()
    }
    files: dict[str, int] = {}
    for chunk in (chunk for tensor in tensors.values() for chunk in tensor.chunks):
        files[chunk.file] = max(files.get(chunk.file, 0), chunk.offset + chunk.extent)
    text = json.dumps({"format": FORMAT, "state": state, "files": files, "tensors": entries}).removesuffix(
        "}"
    )
    return text + _END % crc32c(text.encode())


def _chunk(offsets: list[int], sizes: list[int], **place: Any) -> Chunk:
    return Chunk(tuple(offsets), tuple(sizes), **place)
