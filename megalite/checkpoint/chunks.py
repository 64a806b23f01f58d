"""Writes parts of tensors to a file, with checksums."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from megalite.checkpoint.manifest import ALIGNMENT, Chunk, crc32c


def append(file: BinaryIO, offsets: tuple[int, ...], part: Tensor) -> Chunk:
    """Append a part of a global tensor to a file. part: contiguous, on any device; offsets: its first element
    in the global tensor."""
    start, data = file.tell(), part.detach().cpu().view(-1).view(torch.uint8).numpy()
    filling = bytes(-len(data) % ALIGNMENT)
    file.write(data.data)
    file.write(filling)
    _start_writing(file, start)
    return Chunk(
        offsets, tuple(part.shape), Path(file.name).name, start, len(data), f"{crc32c(data, filling):08x}"
    )


def _start_writing(file: BinaryIO, start: int) -> None:
    """Start writing to disk what was appended since `start`. Otherwise the kernel waits for gigabytes, and
    the final sync for all of it.

    POSIX_FADV_DONTNEED makes Linux write the pages, and keeps them from evicting cached pages that training
    needs.
    """
    if hasattr(os, "posix_fadvise"):
        file.flush()
        os.posix_fadvise(file.fileno(), start, 0, os.POSIX_FADV_DONTNEED)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
