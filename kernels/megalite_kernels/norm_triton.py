"""RMSNorm, residual addition with RMSNorm, and LayerNorm in one pass over memory: the functions of `norm`.

RMSNorm is LayerNorm without mean and bias, so one kernel per direction serves all three. A program holds
whole rows in registers, several if rows are short (a head's queries), and rounds each result once from fp32.
Values read and written per element: forward 2, with the addition 4; backward 3, with the gradient that
reaches the sum past the norm 4.

Backward runs a fixed number of programs. Each loops over tiles of rows, loading the next tile's values while
it computes, and keeps its part of the weight's gradient in registers; the parts are then summed in order. So
there are no atomics, and results are bitwise reproducible on devices of one kind. A norm has the same bits
with and without the addition if a row is a multiple of 16 bytes: otherwise the compiler may lay out the two
kernels' sums differently.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite_kernels.launch import Variant, architecture, operation

TILE = 2048  # least number of values per program: 4 warps of 32 threads
VALUES = 16  # values per thread, 32 in the widest rows: backward uses up to 128 registers
# Number of warps that have enough registers for backward on one multiprocessor: the most that a program uses.
WARPS = {"sm_80": 16, "sm_90": 16, "sm_100": 16, "gfx942": 8}
# iterations of backward that overlap: in shared memory; on AMD in registers
STAGES = {"sm_80": 2, "sm_90": 2, "sm_100": 2, "gfx942": 1}


@triton.jit
def _tile(
    tile, rows,
    HIDDEN: tl.constexpr, HEADS: tl.constexpr, STRIDE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return the row numbers [ROWS] of this program, the offsets of their elements, and which elements exist.

    Offsets are [ROWS, COLUMNS], in x and in all other tensors. In x, groups of HEADS consecutive rows begin
    STRIDE elements apart.
    """
    row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    first = (row // HEADS) * STRIDE + (row % HEADS) * HIDDEN
    exists = (row < rows)[:, None] & (column < HIDDEN)
    return row, first[:, None] + column, row[:, None] * HIDDEN + column, exists


@triton.jit
def _pointers(matrix, tile, at, HIDDEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return pointers to a tile, whose offsets are `at`.

    With the widest rows no registers are left to keep these 64-bit offsets in until after the sums of a row,
    so they are computed again, in a form that is not the common subexpression.
    """
    if COLUMNS > 8192:
        within = tl.arange(0, ROWS)[:, None] * HIDDEN + tl.arange(0, COLUMNS)[None, :]
        return matrix + tl.cast(tile, tl.int64) * (ROWS * HIDDEN) + within
    return matrix + at


@triton.jit
def _repeat(vector, HIDDEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load [HIDDEN] as fp32 [ROWS, COLUMNS] in the layout of a tile.

    Threads then do not exchange values.
    """
    column = tl.arange(0, COLUMNS)[None, :] + tl.zeros((ROWS, 1), tl.int32)
    return tl.load(vector + column, mask=column < HIDDEN, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def _forward(
    x, branch, weight, bias, total, y, mean, rstd, rows,
    HIDDEN: tl.constexpr, HEADS: tl.constexpr, STRIDE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    OFFSET: tl.constexpr, ROUNDED: tl.constexpr, ADD: tl.constexpr, LAYER: tl.constexpr,
    WEIGHT: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    row, x_at, at, exists = _tile(tl.program_id(0), rows, HIDDEN, HEADS, STRIDE, ROWS, COLUMNS)
    dtype = y.dtype.element_ty
    value = tl.load(x + x_at, mask=exists, other=0.0).to(tl.float32)
    if ADD:
        rounded = (value + tl.load(branch + at, mask=exists, other=0.0).to(tl.float32)).to(dtype)
        tl.store(total + at, rounded, mask=exists)
        value = rounded.to(tl.float32)
    if LAYER:
        center = tl.sum(value, 1) / HIDDEN
        tl.store(mean + row, center, mask=row < rows)
        value = tl.where(exists, value - center[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(value * value, 1) / HIDDEN + EPS)
    tl.store(rstd + row, scale, mask=row < rows)
    result = value * scale[:, None]
    if WEIGHT:
        # like transformers' Llama, in x's dtype before the multiplication by the weight
        if ROUNDED:
            result = result.to(dtype).to(tl.float32)
        result *= _repeat(weight, HIDDEN, ROWS, COLUMNS) + OFFSET
    if LAYER:
        result += _repeat(bias, HIDDEN, ROWS, COLUMNS)
    tl.store(y + at, result.to(dtype), mask=exists)


@triton.jit(do_not_specialize=["rows"])
def _backward(
    dy, dtotal, x, weight, mean, rstd, dx, dweight, dbias, rows,
    HIDDEN: tl.constexpr, HEADS: tl.constexpr, STRIDE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    OFFSET: tl.constexpr, ADD: tl.constexpr, LAYER: tl.constexpr, WEIGHT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    if WEIGHT:
        gain = _repeat(weight, HIDDEN, ROWS, COLUMNS) + OFFSET
    for_weight = tl.zeros((ROWS, COLUMNS), tl.float32)
    for_bias = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row, x_at, at, exists = _tile(tile, rows, HIDDEN, HEADS, STRIDE, ROWS, COLUMNS)
        gradient = tl.load(dy + at, mask=exists, other=0.0).to(tl.float32)
        normed = tl.load(x + x_at, mask=exists, other=0.0).to(tl.float32)
        scale = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
        if LAYER:
            normed -= tl.load(mean + row, mask=row < rows, other=0.0)[:, None]
            for_bias += gradient
        normed *= scale
        if WEIGHT:
            for_weight += gradient * normed
            # With the widest rows no registers are left to keep the weight in.
            gradient *= gain if COLUMNS <= 8192 else _repeat(weight, HIDDEN, ROWS, COLUMNS) + OFFSET
        along = normed * (tl.sum(gradient * normed, 1) / HIDDEN)[:, None]
        if LAYER:
            along += (tl.sum(gradient, 1) / HIDDEN)[:, None]
        result = (gradient - along) * scale
        if ADD:
            pointers = _pointers(dtotal, tile, at, HIDDEN, ROWS, COLUMNS)
            result += tl.load(pointers, mask=exists, other=0.0).to(tl.float32)
        tl.store(_pointers(dx, tile, at, HIDDEN, ROWS, COLUMNS), result.to(dx.dtype.element_ty), mask=exists)
    column = tl.arange(0, COLUMNS)[None, :]
    part = tl.program_id(0) * HIDDEN + column
    if WEIGHT:
        tl.store(dweight + part, tl.sum(for_weight, 0)[None, :], mask=column < HIDDEN)
    if LAYER:
        tl.store(dbias + part, tl.sum(for_bias, 0)[None, :], mask=column < HIDDEN)


@functools.cache
def _variant(
    backward: bool,
    target: str,
    rows_of_x: tuple[int, int, int],
    add: bool,
    layer: bool,
    weighted: bool,
    offset: float,
    eps: float,
    rounded: bool,
) -> Variant:
    hidden, heads, stride = rows_of_x
    columns = triton.next_power_of_2(hidden)
    rows = max(1, TILE // columns)
    threads = rows * columns // VALUES
    warps = min(max(4, threads // (64 if target == "gfx942" else 32)), WARPS[target])
    sizes = {"HIDDEN": hidden, "HEADS": heads, "STRIDE": stride, "ROWS": rows, "COLUMNS": columns}
    constants = {**sizes, "OFFSET": offset, "ADD": add, "LAYER": layer, "WEIGHT": weighted}
    if backward:
        return Variant(_backward, {**constants, "STAGES": STAGES[target]}, warps)
    return Variant(_forward, {**constants, "ROUNDED": rounded, "EPS": eps}, warps)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _rows_of(x: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
    """Return x, copied if the kernels cannot read it in place, with the layout of its rows.

    They read rows that are groups at equal distances, like the heads in a packed projection. The layout is
    the size of a row, the number of rows in a group, and the distance between groups.
    """
    hidden, size, stride = x.shape[-1], x.shape, x.stride()
    grouped = (
        x.dim() > 2
        and stride[-2:] == (hidden, 1)
        and all(stride[d] == size[d + 1] * stride[d + 1] for d in range(x.dim() - 3))
    )
    if grouped and not x.is_contiguous():
        return x, (hidden, size[-2], stride[-3])
    return x.contiguous(), (hidden, 1, hidden)


def _like_normed(
    x: Tensor,
    branch: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    rounded: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    row = *x.shape[:-1], 1
    total = x.new_empty(0 if branch is None else x.shape)
    mean = x.new_empty(0 if bias is None else row, dtype=torch.float32)
    return total, x.new_empty(x.shape), mean, x.new_empty(row, dtype=torch.float32)


@operation(fake=_like_normed)
def norm_forward(
    x: Tensor,
    branch: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    rounded: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the sum of x and branch and its norm [..., H], mean and rstd [..., 1] in fp32.

    With `bias` LayerNorm; without, RMSNorm, and the mean is empty. Without `branch` the norm of x, and the
    sum is empty. Only RMSNorm may have no weight.
    """
    results = _like_normed(x, branch, weight, bias, eps, offset, rounded)
    x, rows_of_x = _rows_of(x)
    if x.numel() > 0:
        rows, target = x.numel() // x.shape[-1], architecture(x.device)
        rounded = rounded and bias is None and offset == 0.0
        added, layer, weighted = branch is not None, bias is not None, weight is not None
        variant = _variant(False, target, rows_of_x, added, layer, weighted, offset, eps, rounded)
        gain = x if weight is None else weight  # x, weight: not read
        inputs = (x, x if branch is None else branch.contiguous(), gain, gain if bias is None else bias)
        variant.launch((triton.cdiv(rows, variant.constants["ROWS"]),), *inputs, *results, rows)
    return results


def _like_gradients(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    offset: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dbias = rstd.new_empty(0 if mean is None else x.shape[-1:])
    return x.new_empty(x.shape), rstd.new_empty(0 if weight is None else x.shape[-1:]), dbias


@operation(fake=_like_gradients)
def norm_backward(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    offset: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx [..., H], with dtotal added; dweight and dbias [H] in fp32.

    Without `mean` the gradients of RMSNorm, and dbias is empty; without `weight` dweight is.
    """
    x, rows_of_x = _rows_of(x)
    hidden, target = x.shape[-1], architecture(x.device)
    rows = x.numel() // hidden
    weighted, gain = weight is not None, rstd if weight is None else weight  # rstd: not read
    added, layer = dtotal is not None, mean is not None
    variant = _variant(True, target, rows_of_x, added, layer, weighted, offset, 0.0, False)
    programs = WARPS[target] // variant.warps * _multiprocessors(x.device)
    programs = min(programs, triton.cdiv(rows, variant.constants["ROWS"]))
    dx, dweight = x.new_empty(x.shape), rstd.new_empty((programs, hidden if weighted else 0))
    dbias = rstd.new_empty((programs, 0 if mean is None else hidden))
    if rows > 0:
        dy = dy.contiguous()
        total = dy if dtotal is None else dtotal.contiguous()  # dy: not read
        inputs = dy, total, x, gain, rstd if mean is None else mean, rstd
        variant.launch((programs,), *inputs, dx, dweight, dbias, rows)
    return dx, dweight.sum(0), rstd.new_empty(0) if mean is None else dbias.sum(0)
