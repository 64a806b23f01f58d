"""The sum of squares of many ranges in one launch: `grad_norm.squared_sum`.

A program sums the squares of one tile in fp32, as a tree: 4,096 fp32 or 8,192 bf16 elements, 16 or 32 of them
per thread. The sums of tiles are added in fp64. The tiles depend only on the ranges' lengths, and there are
no atomics, so sums are bitwise reproducible. A non-finite element makes the sum non-finite. Each
element is read once; no host synchronization.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite_kernels.launch import Variant, operation
from megalite_kernels.ranges_triton import TYPE, address, aligned, cut, locate

TILE_BYTES = 16384  # with 4 warps eight 128-bit loads per thread


@triton.jit
def _squared_sums(owner, rows, sums, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr):
    row, at, exists = locate(owner, rows, 1, ALIGNED, TILE)
    x = tl.load(address(row, 0, DTYPE, ALIGNED) + at, mask=exists, other=0.0).to(tl.float32)
    tl.store(sums + tl.program_id(0), tl.sum(x * x))


@functools.cache
def _variant(dtype: torch.dtype, whole: bool = True) -> Variant:
    constants = {"DTYPE": TYPE[dtype], "ALIGNED": whole, "TILE": TILE_BYTES // dtype.itemsize}
    return Variant(_squared_sums, constants, warps=4)


def _like_total(chunks: list[Tensor]) -> Tensor:
    return chunks[0].new_zeros((), dtype=torch.float64)


@operation(fake=_like_total)
def squared_sum(chunks: list[Tensor]) -> Tensor:
    """Return Σ x² over all elements of all chunks (at least one), [] fp64.

    Chunks that are not aligned to 16 bytes have a launch of their own with narrower loads, so that one of
    them does not slow down the others.
    """
    total = _like_total(chunks)
    for whole in (True, False):
        group = [chunk for chunk in chunks if aligned(chunk) is whole]
        if not group:
            continue
        variant = _variant(chunks[0].dtype, whole)
        tiles = cut([group], variant.constants["TILE"])
        sums = total.new_empty(len(tiles.owner), dtype=torch.float32)
        if len(sums):
            variant.launch((len(sums),), *tiles, sums)
        total += sums.sum(dtype=torch.float64)
    return total
