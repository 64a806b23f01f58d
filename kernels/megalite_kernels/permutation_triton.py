"""Rows in the order of their experts, and back, in one pass over memory.

The kernels compute `permutation.gather_rows`, `combine_rows` and its backward.

A program copies, or sums, a part of one row: the row that it reads is looked up once. So rows are read and
written whole, whatever their order, and a token's rows are added in the order of its choices: the same bits
in every run. Row numbers are 64-bit. With k rows for a token, combining reads k and writes 1 values per
element of a token, its backward reads k + 1 and writes k.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite_kernels.launch import Variant, architecture, operation

TILE_BYTES = 4096  # of a row: with 4 warps two 128-bit loads per thread


@triton.jit
def _gather(rows, index, out, width, COLUMNS: tl.constexpr):
    across = tl.cdiv(width, COLUMNS)
    row = (tl.program_id(0) // across).to(tl.int64)
    column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    source = tl.load(index + row)
    value = tl.load(rows + source * width + column, mask=column < width)
    tl.store(out + row * width + column, value, mask=column < width)


@triton.jit(do_not_specialize=["available", "slots"])
def _combine(
    rows, index, weights, out, available, slots, width, WEIGHTED: tl.constexpr, COLUMNS: tl.constexpr
):
    across = tl.cdiv(width, COLUMNS)
    token = (tl.program_id(0) // across).to(tl.int64)
    column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for slot in range(slots):
        source = tl.load(index + token * slots + slot)
        exists = (column < width) & (source < available)
        value = tl.load(rows + source * width + column, mask=exists, other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights + token * slots + slot)
        total += value
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=column < width)


@triton.jit(do_not_specialize=["slots"])
def _combine_backward(grad, rows, order, weights, drows, dweights, slots, width, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(order + row)
    # there are fewer than 2³¹ choices
    weight, token = tl.load(weights + place), (place.to(tl.int32) // slots).to(tl.int64)
    products = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        sent = tl.load(grad + token * width + column, mask=column < width, other=0.0).to(tl.float32)
        value = tl.load(rows + row * width + column, mask=column < width, other=0.0).to(tl.float32)
        products += sent * value
        drow = (sent * weight).to(drows.dtype.element_ty)
        tl.store(drows + row * width + column, drow, mask=column < width)
    tl.store(dweights + row, tl.sum(products, 0))


@functools.cache
def _variant(chip: str, name: str, dtype: torch.dtype, weighted: bool = False) -> Variant:
    columns = TILE_BYTES // dtype.itemsize
    if name == "combine":
        return Variant(_combine, {"WEIGHTED": weighted, "COLUMNS": columns}, warps=4)
    # two inputs: one 128-bit load of each per thread, of which a warp has 64 on gfx942
    if name == "backward":
        return Variant(_combine_backward, {"COLUMNS": columns}, warps=4 if chip == "gfx942" else 8)
    return Variant(_gather, {"COLUMNS": columns}, warps=4)


def _gathered(rows: Tensor, index: Tensor) -> Tensor:
    return rows.new_empty(len(index), rows.shape[1])


@operation(fake=_gathered)
def gather_rows(rows: Tensor, index: Tensor) -> Tensor:
    """Launch the kernel of `permutation.gather_rows`: rows [n, width], index [m]."""
    out, variant = _gathered(rows, index), _variant(architecture(rows.device), "gather", rows.dtype)
    if out.numel():
        programs = len(index) * triton.cdiv(rows.shape[1], variant.constants["COLUMNS"])
        variant.launch((programs,), rows.contiguous(), index.contiguous(), out, rows.shape[1])
    return out


def _combined(rows: Tensor, index: Tensor, weights: Tensor | None) -> Tensor:
    return rows.new_empty(len(index), rows.shape[1])


@operation(fake=_combined)
def combine_rows(rows: Tensor, index: Tensor, weights: Tensor | None) -> Tensor:
    """Launch the kernel of `permutation.combine_rows`: rows [n, width], index and weights [tokens, k]."""
    out = _combined(rows, index, weights)
    variant = _variant(architecture(rows.device), "combine", rows.dtype, weights is not None)
    if out.numel():
        programs = len(index) * triton.cdiv(rows.shape[1], variant.constants["COLUMNS"])
        factors = rows if weights is None else weights.contiguous()  # rows: not read
        tensors = rows.contiguous(), index.contiguous(), factors, out
        variant.launch((programs,), *tensors, len(rows), index.shape[1], rows.shape[1])
    return out


def _gradients(grad: Tensor, rows: Tensor, order: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), weights.new_empty(len(order))


@operation(fake=_gradients)
def combine_rows_backward(
    grad: Tensor, rows: Tensor, order: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Launch the kernels of `permutation.combine_rows_backward`.

    grad is [tokens, width], rows [n, width], order [n], weights [tokens, k].
    """
    drows, dweights = _gradients(grad, rows, order, weights)
    if len(order):
        tensors = grad.contiguous(), rows.contiguous(), order.contiguous(), weights.contiguous()
        variant = _variant(architecture(rows.device), "backward", rows.dtype)
        variant.launch((len(order),), *tensors, drows, dweights, weights.shape[1], rows.shape[1])
    return drows, dweights
