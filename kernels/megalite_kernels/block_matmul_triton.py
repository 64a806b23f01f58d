"""Matmuls with a matrix in codes of few bits (`block_formats`): x Wᵀ, and dy W for the gradient of x.

A program computes a tile of the result. It reads the codes and scales of a tile of W, computes their values
in fp32, rounds them to the dtype of the other operand, as a matrix in memory would be, and multiplies. W
itself is in no memory: its codes are read once for each tile of rows, a quarter of the bytes of bf16.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import functools

import triton
import triton.language as tl
from torch import Tensor

from megalite_kernels.launch import Variant, architecture, operation

TILES = {"sm_80": (64, 4, 3), "sm_90": (128, 8, 3), "sm_100": (128, 8, 3), "gfx942": (64, 4, 2)}
"""Architecture → rows of a tile, warps, stages."""
READ = 64, 128
"""Elements of the contracted dimension that are read at a time, and columns of a tile."""
FORMS = {"nf4": 0, "fp4": 0, "int8": 1, "mxfp4": 2}
"""Format → how its codes are read: two in a byte, the first in the high (0) or low bits (2), or one (1)."""


@triton.jit
def _values(
    codes, scales, table, row, exists, first, inner,
    FORM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return the values of a tile of W, [ROWS, COLUMNS] in fp32, from column `first` on.

    BLOCK is the number of elements that share a scale; 0: a row.
    """
    row = row.to(tl.int64)[:, None]
    if FORM == 1:
        column = first + tl.arange(0, COLUMNS)
        code = tl.load(codes + row * inner + column[None, :], mask=exists[:, None], other=0)
        values = code.to(tl.int8, bitcast=True).to(tl.float32)
    else:
        byte = first // 2 + tl.arange(0, COLUMNS // 2)
        pair = tl.load(codes + row * (inner // 2) + byte[None, :], mask=exists[:, None], other=0)
        high, low = tl.load(table + (pair >> 4)), tl.load(table + (pair & 15))
        values = tl.interleave(high, low) if FORM == 0 else tl.interleave(low, high)
    if BLOCK == 0:
        values *= tl.load(scales + row, mask=exists[:, None], other=0.0)
    else:
        number = first // BLOCK + tl.arange(0, COLUMNS // BLOCK)
        scale = tl.load(scales + row * (inner // BLOCK) + number[None, :], mask=exists[:, None], other=0.0)
        blocks = tl.reshape(values, (ROWS, COLUMNS // BLOCK, BLOCK)) * scale[:, :, None]
        values = tl.reshape(blocks, (ROWS, COLUMNS))
    return values


@triton.jit(do_not_specialize=["rows"])
def _matmul(
    x, codes, scales, table, out, rows, outputs, inner,
    FORM: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, ACROSS: tl.constexpr, ALONG: tl.constexpr,
):  # fmt: skip
    """out[rows, outputs] = x[rows, inner] Wᵀ. Programs with the same tile of W follow each other."""
    down = tl.cdiv(rows, TILE)
    row = (tl.program_id(0) % down).to(tl.int64) * TILE + tl.arange(0, TILE)
    output = tl.program_id(0) // down * ACROSS + tl.arange(0, ACROSS)
    exists, stored, k = row < rows, output < outputs, tl.arange(0, ALONG)
    total = tl.zeros((TILE, ACROSS), tl.float32)
    for first in range(0, inner, ALONG):
        left = tl.load(x + row[:, None] * inner + (first + k)[None, :], mask=exists[:, None], other=0.0)
        w = _values(codes, scales, table, output, stored, first, inner, FORM, BLOCK, ACROSS, ALONG)
        total = tl.dot(left, tl.trans(w.to(left.dtype)), total, input_precision="ieee")
    place = out + row[:, None] * outputs + output[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=exists[:, None] & stored[None, :])


@triton.jit(do_not_specialize=["rows"])
def _transposed_matmul(
    dy, codes, scales, table, out, rows, outputs, inner,
    FORM: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, ACROSS: tl.constexpr, ALONG: tl.constexpr,
):  # fmt: skip
    """out[rows, inner] = dy[rows, outputs] W. A tile has ALONG columns, and reads ACROSS rows of W."""
    down = tl.cdiv(rows, TILE)
    row = (tl.program_id(0) % down).to(tl.int64) * TILE + tl.arange(0, TILE)
    first = tl.program_id(0) // down * ALONG
    exists, k = row < rows, tl.arange(0, ACROSS)
    total = tl.zeros((TILE, ALONG), tl.float32)
    for start in range(0, outputs, ACROSS):
        output = start + k
        stored = output < outputs
        inside = exists[:, None] & stored[None, :]
        left = tl.load(dy + row[:, None] * outputs + output[None, :], mask=inside, other=0.0)
        w = _values(codes, scales, table, output, stored, first, inner, FORM, BLOCK, ACROSS, ALONG)
        total = tl.dot(left, w.to(left.dtype), total, input_precision="ieee")
    place = out + row[:, None] * inner + (first + tl.arange(0, ALONG))[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=exists[:, None])


@functools.cache
def _variant(chip: str, form: str, block: int, transposed: bool) -> Variant:
    tile, warps, stages = TILES[chip]
    across, along = READ if transposed else READ[::-1]
    constants = {"FORM": FORMS[form], "BLOCK": block, "TILE": tile, "ACROSS": across, "ALONG": along}
    return Variant(_transposed_matmul if transposed else _matmul, constants, warps, stages)


def _launch(
    x: Tensor, out: Tensor, matrix: tuple[Tensor, Tensor, Tensor], form: str, block: int, transposed: bool
) -> Tensor:
    """Compute `out` by the programs of its tiles."""
    if out.numel():
        variant = _variant(architecture(x.device), form, block, transposed)
        width = variant.constants["ALONG" if transposed else "ACROSS"]
        programs = triton.cdiv(len(x), variant.constants["TILE"]) * triton.cdiv(out.shape[1], width)
        inner, outputs = (out.shape[1], x.shape[1]) if transposed else (x.shape[1], out.shape[1])
        variant.launch((programs,), x.contiguous(), *matrix, out, len(x), outputs, inner)
    return out


def _of_outputs(x: Tensor, codes: Tensor, scales: Tensor, table: Tensor, form: str, block: int) -> Tensor:
    return x.new_empty(len(x), len(scales))


@operation(fake=_of_outputs)
def block_matmul(x: Tensor, codes: Tensor, scales: Tensor, table: Tensor, form: str, block: int) -> Tensor:
    """Return x Wᵀ, [n, out], with x [n, in]; in is a multiple of 128.

    Args:
        codes: of W [out, in], row by row, uint8.
        scales: [out, in / block] fp32.
        table: the 16 values of codes of 4 bits, fp32.
        form: a name of `block_formats.FORMATS`.
        block: elements of a row that share a scale; 0: all.
    """
    out = _of_outputs(x, codes, scales, table, form, block)
    return _launch(x, out, (codes, scales, table), form, block, False)


def _of_inputs(dy: Tensor, codes: Tensor, scales: Tensor, table: Tensor, form: str, block: int) -> Tensor:
    return dy.new_empty(len(dy), codes.numel() * (1 if form == "int8" else 2) // len(scales))


@operation(fake=_of_inputs)
def block_transposed_matmul(
    dy: Tensor, codes: Tensor, scales: Tensor, table: Tensor, form: str, block: int
) -> Tensor:
    """Return dy W, [n, in], with dy [n, out]; the other arguments are those of `block_matmul`."""
    out = _of_inputs(dy, codes, scales, table, form, block)
    return _launch(dy, out, (codes, scales, table), form, block, True)
