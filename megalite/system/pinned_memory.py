"""CPU memory for copies to and from a GPU, in pieces: torch rounds every pinned allocation up to a power of two."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

PIECE = 1 << 30  # bytes; a power of two, so that a full piece is not rounded up
ALIGNMENT = 64  # bytes, for copies


def packed(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Consecutive sizes in groups, each of at most `limit` in all; a larger size is a group of its own."""
    groups: list[list[int]] = []
    filled = limit
    for size in sizes:
        if filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1].append(size)
        filled += size
    return groups


def piece_sizes(sizes: Sequence[int]) -> list[int]:
    """Bytes of the pieces that hold parts of these sizes."""
    return [sum(group) for group in packed([_aligned(size) for size in sizes], PIECE)]


def places(sizes: Sequence[int], pieces: Sequence[Tensor]) -> list[Tensor]:
    """The bytes of each part, views of the pieces, which have `piece_sizes`."""
    groups = packed([_aligned(size) for size in sizes], PIECE)
    found = [place for group, piece in zip(groups, pieces, strict=True) for place in piece[: sum(group)].split(group)]
    return [place[:size] for place, size in zip(found, sizes, strict=True)]


def allocate(sizes: Sequence[int], pinned: bool) -> list[Tensor]:
    """Pieces of these sizes, uninitialized."""
    return [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in sizes]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
