"""Weight gradients of codes: `fp8_matmul.add_transposed_product` and `add_transposed_products`.

A program computes a tile of one gradient, over all rows, in fp32 registers, and adds it to the gradient
once. As in `fp8_matmul_triton`, only the products of one block of 128 rows are summed in tensor cores. Both
operands have scales of 128 × 1 elements, which are read beside their codes. Codes are read along the rows,
the contracted dimension, as tensor cores need them. The ends of groups are read on the device.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite_kernels.fp8 import BLOCK
from megalite_kernels.launch import Variant, fp8_architecture, operation

TILES = {
    "sm_89": (64, 128, 8, 3),
    "sm_90": (128, 128, 8, 3),
    "sm_100": (128, 128, 8, 3),
    "sm_120": (64, 128, 8, 3),
}
"""Architecture → rows and columns of a gradient's tile, warps, stages."""


@triton.jit(do_not_specialize=["overwrite"])
def _matmul(
    grad, left, left_scales, right, right_scales, ends, overwrite, rows, height, width,
    OUT: tl.constexpr, IN: tl.constexpr, BLOCK: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """left is [height, rows], and right [width, rows]; groups have whole blocks of rows."""
    across, down = width // IN, height // OUT
    group = tl.program_id(0) // (across * down)
    out = tl.program_id(0) // across % down * OUT + tl.arange(0, OUT)
    column = tl.program_id(0) % across * IN + tl.arange(0, IN)
    start, stop = group * 0, rows // BLOCK
    if GROUPED:
        start = tl.load(ends + group - 1, mask=group > 0, other=0) // BLOCK
        stop = tl.load(ends + group) // BLOCK
    row = tl.arange(0, BLOCK)
    total = tl.zeros((OUT, IN), tl.float32)
    for number in range(start, stop):
        block = group.to(tl.int64) * 0 + number
        at = block * BLOCK + row
        a = tl.load(left + out.to(tl.int64)[:, None] * rows + at[None, :])
        b = tl.load(right + column.to(tl.int64)[None, :] * rows + at[:, None])
        own = tl.load(left_scales + block * height + out)
        other = tl.load(right_scales + block * width + column)
        total += tl.dot(a, b) * own[:, None] * other[None, :]
    place = grad + (group.to(tl.int64) * height + out[:, None]) * width + column[None, :]
    before = tl.load(place, mask=(overwrite + tl.zeros((OUT, IN), tl.int32)) == 0, other=0.0)
    tl.store(place, before + total)


@functools.cache
def _variant(chip: str, grouped: bool) -> Variant:
    out, column, warps, stages = TILES[chip]
    return Variant(_matmul, {"OUT": out, "IN": column, "BLOCK": BLOCK, "GROUPED": grouped}, warps, stages)


@operation(mutates=("grad",))
def add_fp8_gradient(
    grad: Tensor,
    left: Tensor,
    left_scales: Tensor,
    right: Tensor,
    right_scales: Tensor,
    ends: Tensor | None,
    overwrite: bool,
) -> None:
    """Compute grad (+)= leftᵀ right of codes and their scales, by blocks of 128 rows.

    Args:
        grad: [groups, n, m] fp32, contiguous; n and m are multiples of 128.
        left, right: codes, [rows, n] and [rows, m], in memory transposed, otherwise they are copied.
        left_scales, right_scales: [rows / 128, n] and [rows / 128, m].
        ends: [groups] int32, the end of each group's rows, multiples of 128; None: one group has all rows.
    """
    groups, height, width = grad.shape
    if not grad.numel():
        return
    variant = _variant(fp8_architecture(grad.device), ends is not None)
    tiles = height // variant.constants["OUT"] * (width // variant.constants["IN"])
    codes = left.t().contiguous(), left_scales.contiguous(), right.t().contiguous(), right_scales.contiguous()
    bounds = left if ends is None else ends  # left: not read
    variant.launch((groups * tiles,), grad, *codes, bounds, int(overwrite), len(left), height, width)
    torch.autograd.graph.increment_version([grad])
