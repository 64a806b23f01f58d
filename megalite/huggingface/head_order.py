"""Order of heads and head channels in query, key and value matrices of other families.

megalite rotates channel i of a head with channel i + head_dim / 2; where only a part of the pairs rotates,
the first ones do. Other families rotate neighbouring channels, the first channels of a head among themselves,
or in the opposite direction. Attention scores do not depend on the order of channels as long as queries and
keys have the same one, so a conversion reorders rows, and the model needs no other rotation.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache


def rotated_channels(
    head_dim: int, rotary_dim: int, interleaved: bool, backwards: bool = False
) -> Sequence[int]:
    """Return a head's channels in a Hugging Face file, in our order.

    These are the first channels of the pairs that rotate, then the second ones, each followed by half of the
    channels that do not rotate.

    Args:
        interleaved: neighbouring channels are pairs.
        backwards: they rotate in the opposite direction, as pairs do whose channels are exchanged.
    """
    half, middle = rotary_dim // 2, (rotary_dim + head_dim) // 2
    first, second = (
        (range(0, rotary_dim, 2), range(1, rotary_dim, 2))
        if interleaved
        else (range(half), range(half, rotary_dim))
    )
    if backwards:
        first, second = second, first
    return (*first, *range(rotary_dim, middle), *second, *range(middle, head_dim))


def decoupled_channels(plain: int, rotary_dim: int, interleaved: bool) -> Sequence[int]:
    """Return the same if the rotating channels follow `plain` others, as in latent attention."""
    return (
        *range(plain),
        *(plain + channel for channel in rotated_channels(rotary_dim, rotary_dim, interleaved)),
    )


def grouped_heads(part: str, heads: int, kv_heads: int) -> Sequence[int]:
    """Return the heads of a part (q, k or v) in a fused matrix.

    For each key-value head, the matrix has its query heads, then its key, then its value.
    """
    queries = heads // kv_heads
    if part == "q":
        return [head // queries * (queries + 2) + head % queries for head in range(heads)]
    return [head * (queries + 2) + queries + (part == "v") for head in range(kv_heads)]


@cache
def by_head(heads: int, width: int, before: int, channels: tuple[int, ...]) -> tuple[int, ...]:
    """Return the rows of a part of a matrix that has the rows of all parts for a head, then those for the
    next head. Layers share one tuple.

    Args:
        width: rows of a head.
        before: rows of a head that precede those of the part.
        channels: order of the part's rows within a head.
    """
    return tuple(head * width + before + channel for head in range(heads) for channel in channels)


@cache
def rows_of(heads: tuple[int, ...], channels: tuple[int, ...], start: int) -> tuple[int, ...]:
    """Return the rows of the channels of some heads in a matrix whose first head begins at row `start`.

    Layers share one tuple.
    """
    return tuple(start + head * len(channels) + channel for head in heads for channel in channels)
