"""Randomness keyed by what it is for, never by who draws it: the same numbers under every mesh.

Initial weights are drawn on the CPU in row blocks, each from a generator keyed by (seed, segment name, block); a rank draws the blocks
that it holds a part of and keeps its part. (Dropout's keyed mask lies with the kernels.)
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megalite.parallel.spec import Segment

BLOCK_ROWS = 128  # fixed for ever: another value would draw other weights


def key(*parts: int | str) -> int:
    """A 63-bit number that depends on every part and on their order."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def normal(shape: tuple[int, ...], *parts: int | str) -> Tensor:
    """Numbers from normal(0, 1) under the key of `parts`, fp32, on the CPU."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(key(*parts)))


def initial_values(segment: Segment, tp_rank: int, tp_size: int, seed: int) -> Tensor:
    """This rank's part of a segment's initial values, fp32, in its local shape (padding is zero)."""
    part = segment.local(tp_rank, tp_size)
    values = torch.zeros(part.shape, dtype=torch.float32)
    if segment.init_std == 0.0:
        return values.fill_(segment.init_value)
    start, count = part.offsets[0], part.sizes[0]
    columns = slice(part.offsets[1], part.offsets[1] + part.sizes[1]) if len(segment.shape) > 1 else slice(None)
    for block in range(start // BLOCK_ROWS, -(-(start + count) // BLOCK_ROWS) if count else 0):
        first = block * BLOCK_ROWS
        rows = min(BLOCK_ROWS, segment.shape[0] - first)
        drawn = normal((rows, *segment.shape[1:]), seed, segment.name, block).mul_(segment.init_std)
        low, high = max(start, first), min(start + count, first + rows)
        if low < high:
            target = values[low - start : high - start]
            source = drawn[low - first : high - first]
            target[..., : part.sizes[-1]] = source[:, columns] if source.dim() > 1 else source
    return values
