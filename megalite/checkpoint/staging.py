"""Staging memory of saves in the background: training goes on while its content is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megalite.parallel.spec import Rectangle
from megalite.system.pinned_memory import allocate, piece_sizes, places

PART = 1 << 26  # bytes: larger rectangles are split, so that their parts fill the pieces of pinned memory


class Staging:
    """CPU memory for a copy of this rank's rectangles, pinned for a GPU and reused by every copy."""

    def __init__(self) -> None:
        self._pieces: list[Tensor] = []

    def copied(self, rectangles: Sequence[Rectangle]) -> list[Rectangle]:
        """Copy the rectangles.

        The copies are complete when this returns and unchanged until the next call.
        """
        parts = [part for rectangle in rectangles for part in rectangle.split(PART)]
        sizes = [part.tensor.nbytes for part in parts]
        on_gpu = any(part.tensor.is_cuda for part in parts)
        if [piece.numel() for piece in self._pieces] != piece_sizes(sizes):
            self._pieces = []  # freed before the new ones are allocated
            self._pieces = allocate(piece_sizes(sizes), pinned=on_gpu)
        copies = []
        for part, memory in zip(parts, places(sizes, self._pieces), strict=True):
            tensor = memory.view(part.tensor.dtype).view(part.tensor.shape)
            tensor.copy_(part.tensor.detach(), non_blocking=True)
            copies.append(replace(part, tensor=tensor))
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return copies
