"""Gated activations in one pass over memory.

The kernels compute `activation.gated_forward` and `activation.gated_backward` for silu and the tanh form of
gelu.

Both are x · σ(z), with z = x for silu. For gelu z = 2 √(2/π) (x + 0.044715 x³), since (1 + tanh(z/2)) / 2 =
σ(z). So

    a = x σ(z)        a' = σ(z) + a (1 − σ(z)) z'

Forward reads 2 and writes 1 value per element of h; backward, which recomputes h, reads 3 and writes 3,
rounded once from fp32. A program has a tile of rows × columns of h; both halves of the packed gate_up are
read in place. Row numbers are 64-bit.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite_kernels.launch import Variant, operation

TILE_BYTES = 4096  # of one input: with 4 warps two 128-bit loads per thread
COLUMNS = 256  # at most: 512 bytes of a row per warp; the width of every known model is a multiple of it


@triton.jit
def _activate(x, GELU: tl.constexpr):
    """Return a and a' of fp32 x."""
    if GELU:
        z = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        slope = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    else:
        z = x
        slope = 1.0
    small = tl.exp(-tl.abs(z))  # does not overflow, and keeps the digits of 1 − σ where σ rounds to 1
    larger = 1.0 / (1.0 + small)
    smaller = small * larger
    sigma, rest = tl.where(z < 0, smaller, larger), tl.where(z < 0, larger, smaller)
    a = x * sigma
    return a, sigma + a * rest * slope


@triton.jit
def _tile(rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the row numbers [ROWS, 1] and column numbers [1, COLUMNS] of this program's tile.

    The third value says which elements exist.
    """
    across = tl.cdiv(width, COLUMNS)
    program = tl.program_id(0)
    row = (program // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (program % across) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return row, column, (row < rows) & (column < width)


@triton.jit(do_not_specialize=["rows"])
def _forward(gate_up, h, rows, width, GELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column, exists = _tile(rows, width, ROWS, COLUMNS)
    at, gate_at = row * width + column, row * (2 * width) + column
    gate = tl.load(gate_up + gate_at, mask=exists).to(tl.float32)
    up = tl.load(gate_up + gate_at + width, mask=exists).to(tl.float32)
    a, _ = _activate(gate, GELU)
    tl.store(h + at, (a * up).to(h.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["rows"])
def _backward(
    dh, gate_up, dgate_up, h, rows, width, GELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row, column, exists = _tile(rows, width, ROWS, COLUMNS)
    at, gate_at = row * width + column, row * (2 * width) + column
    gradient = tl.load(dh + at, mask=exists).to(tl.float32)
    gate = tl.load(gate_up + gate_at, mask=exists).to(tl.float32)
    up = tl.load(gate_up + gate_at + width, mask=exists).to(tl.float32)
    a, slope = _activate(gate, GELU)
    dtype = h.dtype.element_ty
    tl.store(dgate_up + gate_at, (gradient * up * slope).to(dtype), mask=exists)
    tl.store(dgate_up + gate_at + width, (gradient * a).to(dtype), mask=exists)
    tl.store(h + at, (a * up).to(dtype), mask=exists)


@functools.cache
def _variant(backward: bool, dtype: torch.dtype, act: str, width: int) -> Variant:
    columns = min(triton.next_power_of_2(width), COLUMNS)
    constants = {"GELU": act != "silu", "ROWS": TILE_BYTES // dtype.itemsize // columns, "COLUMNS": columns}
    return Variant(_backward if backward else _forward, constants, warps=4)


def _launch(backward: bool, act: str, h: Tensor, *tensors: Tensor) -> None:
    if h.numel() == 0:
        return
    width = h.shape[-1]
    rows = h.numel() // width
    variant = _variant(backward, h.dtype, act, width)
    tile = variant.constants
    programs = triton.cdiv(rows, tile["ROWS"]) * triton.cdiv(width, tile["COLUMNS"])
    variant.launch((programs,), *tensors, rows, width)


def _like_h(gate_up: Tensor, act: str) -> Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


@operation(fake=_like_h)
def gated_forward(gate_up: Tensor, act: str) -> Tensor:
    """Return act(gate) · up: [..., 2F] -> [..., F]."""
    h = _like_h(gate_up, act)
    _launch(False, act, h, gate_up.contiguous(), h)
    return h


def _like_dgate_up_and_h(dh: Tensor, gate_up: Tensor, act: str) -> tuple[Tensor, Tensor]:
    return gate_up.new_empty(gate_up.shape), _like_h(gate_up, act)


@operation(fake=_like_dgate_up_and_h)
def gated_backward(dh: Tensor, gate_up: Tensor, act: str) -> tuple[Tensor, Tensor]:
    """Return the gradient of `gated_forward` with respect to gate_up, and h.

    dh [..., F] -> [..., 2F], [..., F].
    """
    dgate_up, h = _like_dgate_up_and_h(dh, gate_up, act)
    _launch(True, act, h, dh.contiguous(), gate_up.contiguous(), dgate_up, h)
    return dgate_up, h
