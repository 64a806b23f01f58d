"""Quantization of a range of a matrix to fp8, with the codes of `fp8.quantize` of the whole matrix.

A range is a number of consecutive elements of the flattened matrix, as a shard has them. It cuts blocks of
128 × 128, so that there are two steps: the largest magnitudes of blocks in each range (`block_maxima`), and,
given the maxima over all ranges, codes (`quantize_range`). Ranges start and end at multiples of 32. They may
be as large as memory for their elements in fp32 allows. No communication.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalite_kernels.fp8 import BLOCK, round_to_codes

PIECE = 32
"""Elements that always belong to one block: ranges consist of them."""


def block_rows(start: int, stop: int, columns: int) -> slice:
    """Return the rows of blocks in which elements [start, stop) of a matrix of `columns` columns are."""
    band = BLOCK * columns
    return slice(start // band, -(-stop // band))


def block_maxima(values: Tensor, start: int, columns: int) -> Tensor:
    """Return the largest magnitude of a range in each block.

    Args:
        values: [n], elements from `start` of the flattened matrix.

    Returns:
        [block rows, columns / 128] for the rows of `block_rows`; int32, the bits of fp32 numbers, of which
        NaN are the largest.
    """
    rows = block_rows(start, start + len(values), columns)
    pieces = values.new_zeros((rows.stop - rows.start) * BLOCK * columns // PIECE, dtype=torch.int32)
    first = start // PIECE - rows.start * BLOCK * columns // PIECE
    largest = values.view(-1, PIECE).abs().amax(1).float()
    pieces[first : first + len(largest)] = largest.view(torch.int32) & 0x7FFFFFFF
    return pieces.view(-1, BLOCK, columns // BLOCK, BLOCK // PIECE).amax((1, 3))


def quantize_range(values: Tensor, start: int, columns: int, factors: Tensor) -> Tensor:
    """Return the codes of a range, [n], float8_e4m3fn.

    Args:
        values: [n], elements from `start` of the flattened matrix.
        factors: [block rows, columns / 128], those of `fp8.scale_factors` for the rows of `block_rows`.
    """
    each = factors[:, None, :, None].expand(-1, BLOCK, -1, BLOCK // PIECE).reshape(-1, 1)
    first = start // PIECE - start // (BLOCK * columns) * BLOCK * columns // PIECE
    pieces = values.view(-1, PIECE).float()
    return round_to_codes(pieces * each[first : first + len(pieces)]).view(-1)
