"""The sum of parts in one pass over memory: `ordered_sum.ordered_sum`. Bitwise equal to the reference.

It reads every part once and writes the sum: with two bytes in and four out, 2 · ranks + 4 bytes an element.
Without it each part would also be written and read as fp32. Element numbers are 64-bit.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite_kernels.launch import Variant, operation

TILE = 2048  # elements: with 4 warps two 128-bit loads per thread of a 16-bit part


@triton.jit(do_not_specialize=["ranks"])
def _add(parts, total, ranks, count, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    exists = at < count
    added = tl.load(parts + at, mask=exists).to(tl.float32)
    for _ in range(1, ranks):
        parts += count
        added += tl.load(parts + at, mask=exists).to(tl.float32)
    tl.store(total + at, added.to(total.dtype.element_ty), mask=exists)


@functools.cache
def _variant() -> Variant:
    return Variant(_add, {"TILE": TILE}, warps=4, stages=3)


@operation(mutates=("total",))
def ordered_sum(parts: Tensor, total: Tensor) -> None:
    """Launch the kernel of `ordered_sum.ordered_sum`: parts [ranks, n], total [n]."""
    ranks, count = parts.shape
    if not (parts.is_contiguous() and total.is_contiguous() and total.shape == (count,)):
        raise ValueError(
            f"parts [ranks, n] and their total [n] must be contiguous, not {list(parts.shape)} and "
            f"{list(total.shape)}"
        )
    if count:
        _variant().launch((triton.cdiv(count, TILE),), parts, total, ranks, count)
        torch.autograd.graph.increment_version([total])
