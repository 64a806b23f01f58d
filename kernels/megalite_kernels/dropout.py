"""Dropout whose mask is a pure function of global coordinates.

The bits are the same under every mesh, microbatching and recomputation.

A bit is a hash of (seed, step, site, layer), the global sample index, the position in the sequence, and the
channel, or, for attention probabilities, (global head, key position). Rows (sample, position) and columns
(channel) are hashed separately, which is cheap, and each element mixes one row hash with one column hash:

    h = row ^ column;   h = h · A;   h = h + (h >> 16);   h = h · B;   keep = h < threshold

All arithmetic is int32, wrapping, with the arithmetic right shift, so that every backend computes the same
bits. The resolution of the keep probability is 2^-32. Kept elements are scaled by 1 / (1 − p). The backward
is the same function applied to the gradient.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite_kernels.backend import takes_triton

_A, _B, _C = 0x2C1B3C6D, 0x297A2D39, 0x1B56C4E9  # odd: multiplication by them permutes the int32s


def dropout_key(seed: int, step: int, site: int, layer: int) -> int:
    """Return the int32 key of one dropout call.

    `site` numbers the places in a layer where dropout is applied.
    """
    state = 0
    for word in (seed, step, site, layer):  # splitmix64 over the words
        state = (state + word + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return (state & 0xFFFFFFFF) - (1 << 31)


def _mix_(h: Tensor) -> Tensor:
    """Mix the bits of int32 in place, so that every input bit affects every output bit.

    Nearly a permutation: the shift-add is not one.
    """
    for factor in (_A, _B, _C):
        h.mul_(factor)
        h.add_(h >> 16)
    return h


def row_hash(key: int, samples: Tensor, positions: Tensor) -> Tensor:
    """Return the int32 hashes [S, B] of rows, from global sample indices and positions.

    Samples are [B], positions in the sequence [S], [S, 1] or [S, B].
    """
    indices = samples.to(torch.int64)
    # uses both halves of indices beyond 2^32
    sample = _mix_((indices + (indices >> 32) * _B).to(torch.int32) ^ key)
    return _mix_((positions.to(torch.int32) * _C).reshape(len(positions), -1) + sample)


def column_hash(columns: Tensor, head: Tensor | int = 0) -> Tensor:
    """Return the int32 hash of channels, or of (head, key position); the arguments broadcast."""
    return _mix_(columns.to(torch.int32) * _C + (head + 1) * _A)


def threshold(p: float) -> int:
    """Return the threshold: the hash of a kept element is below it."""
    if not 0.0 <= p < 1.0:
        raise ValueError(f"The dropout probability must be in [0, 1), got {p}.")
    return min(round((1.0 - p) * 2**32) - 2**31, 2**31 - 1)


@functools.cache
def kept_scale(p: float, dtype: torch.dtype) -> float:
    """Return the factor of kept elements: 1 / (1 − p), rounded to `dtype`."""
    return torch.tensor(1.0 / (1.0 - p), dtype=dtype).item()


def keep_scale(rows: Tensor, columns: Tensor, p: float, dtype: torch.dtype) -> Tensor:
    """Return the factors for row and column hashes that broadcast against each other.

    A factor is 0 for dropped elements and `kept_scale` for kept ones.
    """
    limit = threshold(p)
    h = rows ^ columns
    h.mul_(_A)
    h.add_(h >> 16).mul_(_B)
    # lt_ keeps int32: a bool result is 8 times slower on CPU
    return h.lt_(limit).to(dtype).mul_(kept_scale(p, dtype))


def keep_mask(rows: Tensor, channels: Tensor, p: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the factors [S, B, C] for row hashes [S, B] and global channel indices [C]."""
    return keep_scale(rows.unsqueeze(-1), column_hash(channels), p, dtype)


def dropout(
    x: Tensor, key: int, samples: Tensor, positions: Tensor, p: float, channel_offset: int = 0
) -> Tensor:
    """Return the dropout of x [S, B, C]. Applied to dy, it is its own backward.

    Args:
        channel_offset: the global index of x's first channel.
    """
    if p == 0.0:
        return x
    if takes_triton(x):
        from megalite_kernels import dropout_triton

        return dropout_triton.dropout(x, key, samples, positions, p, channel_offset)
    channels = torch.arange(channel_offset, channel_offset + x.shape[-1], device=x.device, dtype=torch.int32)
    return keep_mask(row_hash(key, samples, positions), channels, p, x.dtype).mul_(x)


@dataclass(frozen=True)
class AttentionDropout:
    """Dropout mask of attention probabilities [B, heads, query, key].

    It is computed for any block of queries and keys.
    """

    key: int
    samples: Tensor  # [B]: global sample indices
    p: float
    head_offset: int = 0  # global index of this rank's first head
    position_offset: int = 0  # global position of the first query and key

    def scale(self, heads: int, queries: range, keys: range, dtype: torch.dtype) -> Tensor:
        """Return the factors [B, heads, len(queries), len(keys)]."""

        def arange(start: int, stop: int) -> Tensor:
            return torch.arange(start, stop, device=self.samples.device, dtype=torch.int32)

        offset = self.position_offset
        # [queries, B]
        rows = row_hash(self.key, self.samples, arange(offset + queries.start, offset + queries.stop))
        head = arange(self.head_offset, self.head_offset + heads).unsqueeze(1)
        columns = column_hash(arange(offset + keys.start, offset + keys.stop), head)  # [heads, keys]
        return keep_scale(rows.T[:, None, :, None], columns[:, None, :], self.p, dtype)
