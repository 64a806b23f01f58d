"""Norms with a gate in one pass over memory: `gated_norm.whole_forward` and `whole_backward`.

A program holds whole groups in registers, several if they are short (a head's values), and rounds each result
once from fp32, or where `rounded` asks for it. Backward computes the statistics again: nothing is saved.
Values read and written per element: forward 3, backward 5.

Backward runs a fixed number of programs, each of which goes over its groups and keeps its part of the
weight's gradient in registers; the parts are summed in order. So there are no atomics, and results are
bitwise reproducible on devices of one kind. With a weight for each group, a program has groups of one number.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite_kernels.launch import Variant, architecture, operation
from megalite_kernels.norm_triton import WARPS, _multiprocessors, _repeat, _rows_of

TILE = 2048  # least number of values per program
VALUES = {False: 16, True: 8}  # per thread, in backward or not, unless a group needs more


@triton.jit
def _tile(
    tile, rows, group, z_heads, z_step,
    GROUPS: tl.constexpr, HIDDEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return the offsets [ROWS, COLUMNS] of a tile in x and in z, and which elements exist.

    In z, groups of `z_heads` consecutive rows begin `z_step` elements apart.
    """
    number = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
    row = number * GROUPS + group
    column = tl.arange(0, COLUMNS)[None, :]
    z_at = (row // z_heads) * z_step + (row % z_heads) * HIDDEN
    exists = (number < rows)[:, None] & (column < HIDDEN)
    return row[:, None] * HIDDEN + column, z_at[:, None] + column, exists


@triton.jit(do_not_specialize=["rows", "z_heads"])
def _forward(
    x, z, weight, y, rows, z_heads, z_step,
    GATE: tl.constexpr, ROUNDED: tl.constexpr, EPS: tl.constexpr,
    GROUPS: tl.constexpr, HIDDEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1)
    at, z_at, exists = _tile(
        tl.program_id(0), rows, group, z_heads, z_step, GROUPS, HIDDEN, ROWS, COLUMNS
    )  # fmt: skip
    dtype = y.dtype.element_ty
    value = tl.load(x + at, mask=exists, other=0.0).to(tl.float32)
    gate = tl.load(z + z_at, mask=exists, other=0.0).to(tl.float32)
    act = tl.sigmoid(gate)
    if GATE != "sigmoid":
        act *= gate
    if GATE == "gate_first":
        value *= act
    value *= tl.rsqrt(tl.sum(value * value, 1) / HIDDEN + EPS)[:, None]
    if ROUNDED:
        value = value.to(dtype).to(tl.float32)
    value *= _repeat(weight + group * HIDDEN, HIDDEN, ROWS, COLUMNS)
    if ROUNDED and weight.dtype.element_ty == dtype:
        value = value.to(dtype).to(tl.float32)
    if GATE != "gate_first":
        value *= act
    tl.store(y + at, value.to(dtype), mask=exists)


@triton.jit(do_not_specialize=["rows", "z_heads"])
def _backward(
    dy, x, z, weight, dx, dz, dweight, rows, z_heads, z_step,
    GATE: tl.constexpr, EPS: tl.constexpr,
    GROUPS: tl.constexpr, HIDDEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1)
    gain = _repeat(weight + group * HIDDEN, HIDDEN, ROWS, COLUMNS)
    for_weight = tl.zeros((ROWS, COLUMNS), tl.float32)
    dtype = dx.dtype.element_ty
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        at, z_at, exists = _tile(tile, rows, group, z_heads, z_step, GROUPS, HIDDEN, ROWS, COLUMNS)
        value = tl.load(x + at, mask=exists, other=0.0).to(tl.float32)
        gate = tl.load(z + z_at, mask=exists, other=0.0).to(tl.float32)
        gradient = tl.load(dy + at, mask=exists, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        act = sigmoid if GATE == "sigmoid" else gate * sigmoid
        slope = sigmoid * (1.0 - sigmoid)
        if GATE != "sigmoid":
            slope = sigmoid + gate * slope
        normed = value * act if GATE == "gate_first" else value
        scale = tl.rsqrt(tl.sum(normed * normed, 1) / HIDDEN + EPS)[:, None]
        normed *= scale
        outer = gradient if GATE == "gate_first" else gradient * act
        for_weight += outer * normed
        # with wide groups no registers are left to keep the weight in
        if COLUMNS > 4096:
            gain = _repeat(weight + group * HIDDEN, HIDDEN, ROWS, COLUMNS)
        outer *= gain
        inner = scale * (outer - normed * (tl.sum(outer * normed, 1) / HIDDEN)[:, None])
        if GATE == "gate_first":
            tl.store(dx + at, (inner * act).to(dtype), mask=exists)
            tl.store(dz + at, (inner * value * slope).to(dtype), mask=exists)
        else:
            tl.store(dx + at, inner.to(dtype), mask=exists)
            tl.store(dz + at, (gradient * normed * gain * slope).to(dtype), mask=exists)
    column = tl.arange(0, COLUMNS)
    part = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + group
    tl.store(dweight + part * HIDDEN + column, tl.sum(for_weight, 0), mask=column < HIDDEN)


@functools.cache
def _variant(
    backward: bool, target: str, gate: str, rounded: bool, eps: float, groups: int, hidden: int
) -> Variant:
    columns = triton.next_power_of_2(hidden)
    rows = max(1, TILE // columns)
    threads = rows * columns // VALUES[backward]
    warps = min(max(4, threads // (64 if target == "gfx942" else 32)), WARPS[target])
    constants = {
        "GATE": gate,
        "EPS": eps,
        "GROUPS": groups,
        "HIDDEN": hidden,
        "ROWS": rows,
        "COLUMNS": columns,
    }
    if backward:
        return Variant(_backward, constants, warps)
    return Variant(_forward, {**constants, "ROUNDED": rounded}, warps)


def _like(x: Tensor, z: Tensor, weight: Tensor, gate: str, eps: float, rounded: bool) -> Tensor:
    return x.new_empty(x.shape)


@operation(fake=_like)
def gated_norm_forward(x: Tensor, z: Tensor, weight: Tensor, gate: str, eps: float, rounded: bool) -> Tensor:
    """Return y [.., groups, channels of a group]; the arguments are as in `gated_norm.whole_forward`."""
    y = x.new_empty(x.shape)
    if y.numel() > 0:
        z, (hidden, heads, step) = _rows_of(z)
        groups = weight.numel() // hidden
        rows = x.numel() // (hidden * groups)
        variant = _variant(False, architecture(x.device), gate, rounded, eps, groups, hidden)
        programs = triton.cdiv(rows, variant.constants["ROWS"])
        variant.launch((programs, groups), x.contiguous(), z, weight.contiguous(), y, rows, heads, step)
    return y


def _like_gradients(
    dy: Tensor, x: Tensor, z: Tensor, weight: Tensor, gate: str, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), z.new_empty(z.shape), weight.new_empty(weight.shape, dtype=torch.float32)


@operation(fake=_like_gradients)
def gated_norm_backward(
    dy: Tensor, x: Tensor, z: Tensor, weight: Tensor, gate: str, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x and z, and of the weight in fp32."""
    dx, dz = x.new_empty(x.shape), z.new_empty(z.shape)
    z, (hidden, heads, step) = _rows_of(z)
    groups, target = weight.numel() // hidden, architecture(x.device)
    rows = x.numel() // (hidden * groups)
    variant = _variant(True, target, gate, False, eps, groups, hidden)
    programs = triton.cdiv(WARPS[target] // variant.warps * _multiprocessors(x.device), groups)
    programs = min(programs, triton.cdiv(rows, variant.constants["ROWS"]))
    dweight = weight.new_empty((programs, *weight.shape), dtype=torch.float32)
    if rows > 0:
        tensors = dy.contiguous(), x.contiguous(), z, weight.contiguous(), dx, dz, dweight
        variant.launch((programs, groups), *tensors, rows, heads, step)
    return dx, dz, dweight.sum(0)
