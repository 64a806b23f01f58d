"""Parts of tensors become bytes of a file, with checksums. Needs nothing of DCP, which takes long to import."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from megalite.checkpoint.manifest import ALIGNMENT, Chunk, crc32c


def append(file: BinaryIO, offsets: tuple[int, ...], part: Tensor) -> Chunk:
    """Write a part of a global tensor, contiguous, on any device, which begins there at `offsets`, at the end of a file."""
    start, data = file.tell(), part.detach().cpu().view(-1).view(torch.uint8).numpy()
    filling = bytes(-len(data) % ALIGNMENT)
    file.write(data.data)
    file.write(filling)
    _start_writing(file, start)
    return Chunk(offsets, tuple(part.shape), Path(file.name).name, start, len(data), f"{crc32c(data, filling):08x}")


def _start_writing(file: BinaryIO, start: int) -> None:
    """Set the disk to work on what has been written since `start`: the kernel would wait for gigabytes, and the last sync for all of them.

    Linux writes pages that are said to be needed no more; a cache full of what nobody reads would push out what training needs, too.
    """
    if hasattr(os, "posix_fadvise"):
        file.flush()
        os.posix_fadvise(file.fileno(), start, 0, os.POSIX_FADV_DONTNEED)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
