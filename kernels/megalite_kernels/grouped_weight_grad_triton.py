"""The weight gradients of all experts in one launch: `grouped_weight_grad.add_grouped_gradient`.

A program computes a tile of one expert's gradient, over all of the expert's rows, in fp32 registers, and adds
it to the gradient once: no atomics, and no temporary. Tiles of one expert follow each other, so that its rows
are read from the second-level cache. Row numbers are 64-bit, and the experts' sizes are read on the device.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite_kernels.launch import Variant, architecture, operation

TILES = {
    "sm_80": (128, 128, 32, 8, 3),
    "sm_90": (128, 128, 64, 4, 3),
    "sm_100": (128, 128, 64, 8, 3),
    "gfx942": (128, 128, 32, 8, 2),
}
"""Architecture → rows and columns of a gradient's tile, rows of the experts at a time, warps, stages. That of
sm_90 was the fastest on an H200."""


@triton.jit(do_not_specialize=["overwrite"])
def _matmul(
    grad, grad_output, inputs, ends, overwrite, height, width,
    OUT: tl.constexpr, IN: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    across, down = tl.cdiv(width, IN), tl.cdiv(height, OUT)
    expert = tl.program_id(0) // (across * down)
    out = tl.program_id(0) // across % down * OUT + tl.arange(0, OUT)
    column = tl.program_id(0) % across * IN + tl.arange(0, IN)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0).to(tl.int64)
    count = tl.load(ends + expert) - start.to(tl.int32)
    left = grad_output + start * height
    right = inputs + start * width
    row = tl.arange(0, ROWS)
    total = tl.zeros((OUT, IN), tl.float32)
    for first in range(0, count, ROWS):
        at = (first + row).to(tl.int64)[:, None]
        inside = (first + row < count)[:, None]
        a = tl.load(left + at * height + out[None, :], mask=inside & (out < height)[None, :], other=0.0)
        b = tl.load(right + at * width + column[None, :], mask=inside & (column < width)[None, :], other=0.0)
        total = tl.dot(tl.trans(a), b, total)
    exists = (out < height)[:, None] & (column < width)[None, :]
    place = grad + (expert.to(tl.int64) * height + out[:, None]) * width + column[None, :]
    before = tl.load(place, mask=exists & (overwrite == 0), other=0.0)
    tl.store(place, before + total, mask=exists)


@functools.cache
def _variant(chip: str) -> Variant:
    out, column, rows, warps, stages = TILES[chip]
    return Variant(_matmul, {"OUT": out, "IN": column, "ROWS": rows}, warps, stages)


@operation(mutates=("grad",))
def add_grouped_gradient(
    grad: Tensor, grad_output: Tensor, inputs: Tensor, ends: Tensor, overwrite: bool
) -> None:
    """Launch the kernel of `grouped_weight_grad.add_grouped_gradient`.

    grad is [experts, out, in] fp32, contiguous; grad_output [n, out]; inputs [n, in]; ends [experts] int32,
    the end of each expert's rows.
    """
    experts, height, width = grad.shape
    if not grad.numel():
        return
    variant = _variant(architecture(grad.device))
    tiles = triton.cdiv(height, variant.constants["OUT"]) * triton.cdiv(width, variant.constants["IN"])
    tensors = grad, grad_output.contiguous(), inputs.contiguous(), ends
    variant.launch((experts * tiles,), *tensors, int(overwrite), height, width)
    torch.autograd.graph.increment_version([grad])
