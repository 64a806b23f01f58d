"""Random numbers keyed by their purpose, not by the rank that draws them: the same numbers under every mesh.

Initial weights are drawn on the CPU in blocks of rows, each from a generator keyed by (seed, segment name, block). A rank draws the blocks
that it holds a part of and keeps its part. (Dropout's keyed mask is in the kernels.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megalite.mesh.layout import Coordinates
    from megalite.parallel.spec import Segment

BLOCK_ROWS = 128  # never change it: another value would draw other weights from the same seed


def key(*parts: int | str) -> int:
    """A 63-bit number that depends on every part and on their order."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def normal(shape: tuple[int, ...], *parts: int | str) -> Tensor:
    """Samples of normal(0, 1) with the key of `parts`, fp32, on the CPU."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(key(*parts)))


def initial_values(segment: Segment, at: Coordinates, seed: int) -> Iterator[Tensor]:
    """A segment's initial values on the rank at these coordinates, fp32: blocks of rows of its local shape, in order (padding is zero).

    Yields blocks rather than one tensor, which for a large embedding would double the memory.
    """
    part = segment.local(at)
    if segment.init_std == 0.0:
        yield torch.full(part.shape, segment.init_value)
        return
    start, stop = part.offsets[0], part.offsets[0] + part.sizes[0]
    columns = tuple(slice(offset, offset + size) for offset, size in zip(part.offsets[1:], part.sizes[1:], strict=True))
    for drawn in drawn_rows(segment, start, stop, seed):
        values = torch.zeros(drawn.shape[0], *part.shape[1:])
        values[(slice(None), *(slice(0, size) for size in part.sizes[1:]))] = drawn[(slice(None), *columns)]
        yield values
    if part.shape[0] > part.sizes[0]:
        yield torch.zeros(part.shape[0] - part.sizes[0], *part.shape[1:])


def drawn_rows(segment: Segment, start: int, stop: int, seed: int) -> Iterator[Tensor]:
    """Rows [start, stop) of a segment's random initial values, fp32, whole: in blocks, with the columns of all ranks, so that no number
    depends on the mesh."""
    for first in range(start - start % BLOCK_ROWS, stop, BLOCK_ROWS) if start < stop else ():
        rows = min(BLOCK_ROWS, segment.shape[0] - first)
        drawn = normal((rows, *segment.shape[1:]), seed, segment.name, first // BLOCK_ROWS).mul_(segment.init_std)
        yield drawn[max(start - first, 0) : stop - first]
