"""Chunks of tensor data with checksums, which are verified when a chunk is read.

A chunk is a rectangle of a global tensor, row-major. Each is padded with zeros to a multiple of 128 bytes,
which its checksum includes, and the next one follows: every byte of a file is covered by a checksum.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
from numpy.typing import NDArray

from megalite.checkpoint.errors import damaged
from megalite.config import run_files

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ALIGNMENT = 128  # bytes


def crc32c(*parts: bytes | NDArray[np.uint8]) -> int:
    """Return the CRC-32C of the concatenated parts.

    It uses the Castagnoli polynomial, for which CPUs have an instruction.
    """
    import google_crc32c  # takes 30 ms, and only saves and loads need it

    value = 0
    for part in parts:
        value = google_crc32c.extend(value, part)
    return value


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a global tensor, and its place in a file."""

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

    @property
    def position(self) -> tuple[str, int]:
        """The file and the offset in it: the order in which chunks are read."""
        return self.file, self.offset


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in a manifest, such as float32."""
    return str(dtype).removeprefix("torch.")


# ---- writing


def append_chunk(file: BinaryIO, offsets: tuple[int, ...], part: Tensor) -> Chunk:
    """Append a part of a global tensor to a file.

    Args:
        offsets: the part's first element in the global tensor.
        part: contiguous, on any device.
    """
    import torch

    start, data = file.tell(), part.detach().cpu().view(-1).view(torch.uint8).numpy()
    padding = bytes(-len(data) % ALIGNMENT)
    file.write(data.data)
    file.write(padding)
    _start_writeback(file, start)
    checksum = f"{crc32c(data, padding):08x}"
    return Chunk(offsets, tuple(part.shape), Path(file.name).name, start, len(data), checksum)


def _start_writeback(file: BinaryIO, start: int) -> None:
    """Start writing the bytes from `start` on to disk.

    Otherwise the kernel waits for gigabytes, and the final sync for all of them.

    POSIX_FADV_DONTNEED makes Linux write the pages, and keeps them from evicting cached pages that training
    needs.
    """
    if hasattr(os, "posix_fadvise"):
        file.flush()
        os.posix_fadvise(file.fileno(), start, 0, os.POSIX_FADV_DONTNEED)


# ---- reading


def read_verified(
    open_file: Callable[[str], AbstractContextManager[BinaryIO]], chunks: Iterable[Chunk]
) -> Iterator[tuple[Chunk, NDArray[np.uint8]]]:
    """Yield each chunk with its bytes, file by file; one chunk is in memory at a time.

    Args:
        open_file: opens the file of this name, and checks its size.

    Raises:
        DamagedError: a file is missing or has another size, or the checksum of a chunk differs.
    """
    ordered = sorted(chunks, key=lambda chunk: chunk.position)
    for name, chunks_of_file in groupby(ordered, key=lambda chunk: chunk.file):
        with open_file(name) as file:
            for chunk in chunks_of_file:
                yield chunk, _read_chunk(file, chunk)


@contextmanager
def open_checked(path: Path, size: int) -> Iterator[BinaryIO]:
    """Open a file and check its size in bytes. Raises DamagedError, also for read errors of the disk.

    A file that is not there is opened in the store that the checkpoint is from, if it is from one.
    """
    expected = f"{size:,} bytes"
    if not path.exists() and path.with_name(run_files.ORIGIN).exists():
        from megalite.checkpoint.stored_data import open_stored  # not needed by local checkpoints

        with open_stored(path, size) as stored:
            yield stored
        return
    try:
        with open(path, "rb") as file:
            actual = path.stat().st_size
            if actual != size:
                raise damaged(path, expected, f"{actual:,}")
            yield file
    except OSError as error:
        raise damaged(path, expected, error.strerror or str(error)) from None


def _read_chunk(file: BinaryIO, chunk: Chunk) -> NDArray[np.uint8]:
    data = np.empty(chunk.extent, np.uint8)
    file.seek(chunk.offset)
    file.readinto(data)  # type: ignore[attr-defined]
    checksum = f"{crc32c(data):08x}"
    if checksum != chunk.crc32c:
        place = f"bytes {chunk.offset:,} to {chunk.offset + chunk.extent:,}"
        raise damaged(file.name, f"checksum {chunk.crc32c} of {place}", checksum)
    return data[: chunk.bytes]
