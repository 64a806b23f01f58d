"""CPU memory for copies to and from a GPU: in pieces, since torch rounds every pinned allocation up to a
power of two; and such copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

PIECE = 1 << 30  # bytes; a power of two, so that a full piece is not rounded up
ALIGNMENT = 64  # bytes, for copies


def packed(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Group consecutive sizes so that a group has at most `limit` in total.

    A larger size forms a group of its own.
    """
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
    """Return the bytes of the pieces that store parts of these sizes."""
    return [sum(group) for group in packed([_aligned(size) for size in sizes], PIECE)]


def places(sizes: Sequence[int], pieces: Sequence[Tensor]) -> list[Tensor]:
    """Return the bytes of each part as views of the pieces, which have `piece_sizes`."""
    groups = packed([_aligned(size) for size in sizes], PIECE)
    buffers = [
        place
        for group, piece in zip(groups, pieces, strict=True)
        for place in piece[: sum(group)].split(group)
    ]
    return [place[:size] for place, size in zip(buffers, sizes, strict=True)]


def allocate(sizes: Sequence[int], pinned: bool) -> list[Tensor]:
    """Allocate uninitialized pieces of these sizes."""
    return [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in sizes]


def copy_later(x: Tensor, into: Tensor) -> None:
    """Start copying a tensor in CPU memory to another device, which may be busy: the host does not wait, and
    may change x afterwards."""
    into.copy_(x if into.is_cpu else x.pin_memory(), non_blocking=True)


def read_later(x: Tensor) -> Callable[[], Tensor]:
    """Start copying a tensor from its device. Returns a function that waits for the copy, but not for later
    work of the device."""
    if x.is_cpu:
        return lambda: x
    copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    copy.copy_(x, non_blocking=True)
    arrived = torch.cuda.current_stream(x.device).record_event()

    def read() -> Tensor:
        arrived.synchronize()
        return copy

    return read


def read_aside(make: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """Read the result of `make`, which runs on its own stream, as `read_later` does.

    Nothing that `make` reads may still be queued on the current stream.
    """
    with torch.cuda.stream(side_stream(device)):
        return read_later(make())


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream for reads by the host while the device has other work."""
    return torch.cuda.Stream(device)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
