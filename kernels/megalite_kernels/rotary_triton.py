"""Rotary embedding in one pass over memory: the kernel of `rotary`.

It also splits the packed projection.

Queries, keys and values of any strides are read once and written to one packed buffer, queries and keys
rotated, values unchanged: in forward the three parts of a packed projection, in backward their gradients. (In
forward values could stay where they are, for a sixth less traffic with 32 query and 8 key-value heads; but
that would keep the whole projection in memory.) A row is one head of one token; a program has a tile of rows.
Every head of a token reads the tables, but only the first one from memory: the others hit the cache. Of the
tables' D columns the last D/2 are read: the first repeat them (the sines negated). Offsets are 64-bit, except
row numbers: 2³¹ rows do not fit in memory.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite_kernels.launch import Variant, operation

TILE_BYTES = 4096  # of the first halves of rows: with 4 warps two 128-bit loads per thread


@triton.jit
def _tile(rows, heads, batch, ROWS: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr):
    """Return the rows [ROWS, 1] and pairs of channels [1, PAIRS] of this program.

    Rows have numbers, positions, samples and heads. The last value says which elements exist.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    pair = tl.arange(0, PAIRS)[None, :]
    token = row // heads
    position, sample = (token // batch).to(tl.int64), (token % batch).to(tl.int64)
    head = (row % heads).to(tl.int64)
    return row.to(tl.int64), position, sample, head, pair, (row < rows) & (pair < HALF)


@triton.jit
def _turn(source, cos, sin, target, exists, turns, sign, HALF: tl.constexpr):
    """Rotate rows by sign · angle where `turns`, else copy them.

    source, cos, sin and target point to first halves.
    """
    first, second = tl.load(source, mask=exists), tl.load(source + HALF, mask=exists)
    c = tl.load(cos, mask=exists & turns).to(tl.float32)
    s = tl.load(sin, mask=exists & turns).to(tl.float32) * tl.cast(sign, tl.float32)
    x, y = first.to(tl.float32), second.to(tl.float32)
    tl.store(target, tl.where(turns, (x * c - y * s).to(first.dtype), first), mask=exists)
    tl.store(target + HALF, tl.where(turns, (y * c + x * s).to(first.dtype), second), mask=exists)


@triton.jit(do_not_specialize=["rows"])
def _rotary(
    q, k, v, cos, sin, out, sign, rows, batch, q_heads, k_heads,
    q_position_step, q_sample_step, q_head_step,
    k_position_step, k_sample_step, k_head_step,
    v_position_step, v_sample_step, v_head_step,
    table_position_step, table_sample_step,
    HALF: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row, position, sample, head, pair, exists = _tile(rows, q_heads + 2 * k_heads, batch, ROWS, HALF, PAIRS)
    turned = q_heads + k_heads
    from_q = q + position * q_position_step + sample * q_sample_step + head * q_head_step + pair
    from_k = k + position * k_position_step + sample * k_sample_step + (head - q_heads) * k_head_step + pair
    from_v = v + position * v_position_step + sample * v_sample_step + (head - turned) * v_head_step + pair
    source = tl.where(head < q_heads, from_q, tl.where(head < turned, from_k, from_v))
    angle = position * table_position_step + sample * table_sample_step + HALF + pair
    _turn(source, cos + angle, sin + angle, out + row * (2 * HALF) + pair, exists, head < turned, sign, HALF)


@functools.cache
def _variant(dtype: torch.dtype, head_dim: int) -> Variant:
    pairs = triton.next_power_of_2(head_dim // 2)
    rows = max(TILE_BYTES // dtype.itemsize // pairs, 1)
    return Variant(_rotary, {"HALF": head_dim // 2, "PAIRS": pairs, "ROWS": rows}, warps=4)


def _packed(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    return q.new_empty((*q.shape[:2], q.shape[2] + 2 * k.shape[2], q.shape[3]))


@operation(fake=_packed)
def rotate_and_pack(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """Return q, k and v packed as [S, B, hq + 2·hk, D], with q and k rotated.

    q is [S, B, hq, D], k and v are [S, B, hk, D] with any strides; hk may be 0. The rotation is by their
    positions' angles, with `inverse` by the opposite ones.
    """
    packed = _packed(q, k, v, cos, sin, inverse)
    if packed.numel() > 0:
        sources = [source if source.stride(-1) == 1 else source.contiguous() for source in (q, k, v)]
        cos, sin = cos.contiguous(), sin.contiguous()
        steps = [step for source in sources for step in source.stride()[:3]]
        steps += [cos.stride(0), cos.stride(1) if cos.shape[1] > 1 else 0]
        batch, q_heads, head_dim = q.shape[1:]
        rows, variant = packed.numel() // head_dim, _variant(q.dtype, head_dim)
        programs = triton.cdiv(rows, variant.constants["ROWS"])
        numbers = -1.0 if inverse else 1.0, rows, batch, q_heads, k.shape[2], *steps
        variant.launch((programs,), *sources, cos, sin, packed, *numbers)
    return packed
