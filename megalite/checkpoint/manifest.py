"""The manifest of a checkpoint: its state, and the file, bytes and checksum of every part of every tensor.

    {"format": 1, "state": {…}, "files": {"rank_00000.bin": 128}, "tensors": {NAME: {"dtype": "float32",
     "shape": [8, 4], "chunks": [
      {"offsets": [0, 0], "sizes": [8, 4], "file": "rank_00000.bin", "offset": 0, "bytes": 128,
       "crc32c": "8a9136aa"}]}}, "crc32c": "1b9ca2d7"}

`chunks` says what a chunk is, and verifies its checksum. The last checksum covers all text before it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from megalite.checkpoint.checksummed_chunks import Chunk, crc32c, open_checked, read_verified
from megalite.checkpoint.errors import CheckpointError, damaged
from megalite.config import run_files
from megalite.parallel import spec

FORMAT = 1
WEIGHT, EMA = f"{spec.WEIGHT}/", f"{spec.EMA}/"
"""How the names of weights, and of their averages (`train.ema_decay`), begin."""
_END = ', "crc32c": "%08x"}\n'


@dataclass(frozen=True)
class StoredTensor:
    """A global tensor of a checkpoint with the chunks that cover it."""

    dtype: str  # torch's name, for example float32
    shape: tuple[int, ...]
    chunks: list[Chunk]


@dataclass(frozen=True)
class Manifest:
    """The manifest of a checkpoint.

    Attributes:
        state: JSON data as it was saved.
        tensors: tensors by global name.
        files: sizes of the files in bytes.
    """

    directory: Path
    state: dict[str, Any]
    tensors: dict[str, StoredTensor]
    files: dict[str, int]

    @staticmethod
    def of(directory: Path) -> Manifest:
        """Read the manifest of a directory.

        Raises:
            DamagedError: it is missing or damaged.
            CheckpointError: its format is another version's.
        """
        path = directory / run_files.MANIFEST
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise damaged(path, "a file", error.strerror or "none") from None
        return Manifest.parsed(raw, directory)

    @staticmethod
    def parsed(raw: bytes, directory: Path) -> Manifest:
        """Return the manifest with this text, of a checkpoint in `directory`. Raises as `of`."""
        path = directory / run_files.MANIFEST
        size = len(_END % 0)
        expected, end = (_END % crc32c(raw[:-size])).encode(), raw[-size:]
        if end != expected:
            raise damaged(path, f"{expected!r} at the end of its {len(raw):,} bytes", repr(end))
        content = json.loads(raw)
        if content["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has format version {content['format']}, but this version of megalite only supports "
                f"{FORMAT}"
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
        """Return the checkpoint with the averaged weights in place of the weights.

        Frozen weights have no average and are kept. Raises CheckpointError if there are no averages.
        """
        if not self.has_averages:
            raise CheckpointError(
                f"{self.directory} does not contain averaged weights because train.ema_decay was not set. "
                "Remove --ema."
            )
        averages = {
            WEIGHT + name.removeprefix(EMA): tensor
            for name, tensor in self.tensors.items()
            if name.startswith(EMA)
        }
        return replace(self, tensors={**self.tensors, **averages})

    def chunks(self) -> Iterator[Chunk]:
        for tensor in self.tensors.values():
            yield from tensor.chunks

    def read(self, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, NDArray[np.uint8]]]:
        """Yield each chunk with its bytes, verified. Raises DamagedError (`read_verified`)."""
        return read_verified(self.opened, chunks)

    def opened(self, name: str) -> AbstractContextManager[BinaryIO]:
        """Open a file of the checkpoint. Raises DamagedError if it is missing or has another size."""
        return open_checked(self.directory / name, self.files[name])

    def check_files(self) -> None:
        """Raise DamagedError if a file is missing or has another size. Reads no data."""
        for name in self.files:
            with self.opened(name):
                pass

    def verify(self, rank: int = 0, size: int = 1) -> int:
        """Verify the rank-th of `size` shares of all bytes.

        Return the number of bytes of the share. Raises DamagedError.
        """
        self.check_files()
        own = sorted(self.chunks(), key=lambda chunk: chunk.position)[rank::size]
        return sum(chunk.extent for chunk, _ in self.read(own))


def encode(state: dict[str, Any], tensors: dict[str, StoredTensor]) -> str:
    """Return the text of a manifest."""
    entries = {
        name: {**vars(tensor), "chunks": [vars(chunk) for chunk in tensor.chunks]}
        for name, tensor in tensors.items()
    }
    files: dict[str, int] = {}
    for tensor in tensors.values():
        for chunk in tensor.chunks:
            files[chunk.file] = max(files.get(chunk.file, 0), chunk.offset + chunk.extent)
    content = json.dumps({"format": FORMAT, "state": state, "files": files, "tensors": entries})
    text = content.removesuffix("}")
    return text + _END % crc32c(text.encode())


def _chunk(offsets: list[int], sizes: list[int], **place: Any) -> Chunk:
    return Chunk(tuple(offsets), tuple(sizes), **place)
