"""Rotary embedding in one pass over memory, together with the split of the packed projection: the kernels of `rotary`.

Going forward a packed q|k|v is read once and written once, its queries and keys turned, its values as they are. (Values could stay
where they are, for a sixth less traffic with 32 query and 8 key-value heads; but that would keep the whole projection in memory.) Going
backward three gradients, of any strides, are read once and written into one packed gradient. A row is one head of one token; a program
takes a tile of them. The tables are read by every head of a token, but come from memory once: the next heads find them in the cache.
Of their D columns the first D/2 are read: the others repeat them. Everything is counted in 64 bits but rows, of which no memory holds 2³¹.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite_kernels.launch import POINTER, Variant, operation

TILE_BYTES = 4096  # of the first halves of rows: with 4 warps two 128-bit loads a thread


@triton.jit
def _tile(rows, heads, batch, ROWS: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr):
    """This program's rows [ROWS, 1]: their numbers, positions, samples and heads; pairs of channels [1, PAIRS]; which elements exist."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    pair = tl.arange(0, PAIRS)[None, :]
    token = row // heads
    position, sample, head = (token // batch).to(tl.int64), (token % batch).to(tl.int64), (row % heads).to(tl.int64)
    return row.to(tl.int64), position, sample, head, pair, (row < rows) & (pair < HALF)


@triton.jit
def _turn(source, cos, sin, target, exists, turns, sign, HALF: tl.constexpr):
    """Rows turned by sign · angle where they turn, else copied; the first four are pointers to first halves."""
    first, second = tl.load(source, mask=exists), tl.load(source + HALF, mask=exists)
    c = tl.load(cos, mask=exists & turns).to(tl.float32)
    s = tl.load(sin, mask=exists & turns).to(tl.float32) * tl.cast(sign, tl.float32)
    x, y = first.to(tl.float32), second.to(tl.float32)
    tl.store(target, tl.where(turns, (x * c - y * s).to(first.dtype), first), mask=exists)
    tl.store(target + HALF, tl.where(turns, (y * c + x * s).to(first.dtype), second), mask=exists)


@triton.jit(do_not_specialize=["rows"])
def _heads(
    x, cos, sin, out, sign, rows, batch, heads, turned, position_step, sample_step, head_step, table_position_step, table_sample_step,
    HALF: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row, position, sample, head, pair, exists = _tile(rows, heads, batch, ROWS, HALF, PAIRS)
    source = x + position * position_step + sample * sample_step + head * head_step + pair
    angle = position * table_position_step + sample * table_sample_step + pair
    _turn(source, cos + angle, sin + angle, out + row * (2 * HALF) + pair, exists, head < turned, sign, HALF)


@triton.jit(do_not_specialize=["rows"])
def _three(
    q, k, v, cos, sin, out, sign, rows, batch, q_heads, k_heads, q_position_step, q_sample_step, q_head_step,
    k_position_step, k_sample_step, k_head_step, v_position_step, v_sample_step, v_head_step, table_position_step, table_sample_step,
    HALF: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row, position, sample, head, pair, exists = _tile(rows, q_heads + 2 * k_heads, batch, ROWS, HALF, PAIRS)
    turned = q_heads + k_heads
    from_q = q + position * q_position_step + sample * q_sample_step + head * q_head_step + pair
    from_k = k + position * k_position_step + sample * k_sample_step + (head - q_heads) * k_head_step + pair
    from_v = v + position * v_position_step + sample * v_sample_step + (head - turned) * v_head_step + pair
    source = tl.where(head < q_heads, from_q, tl.where(head < turned, from_k, from_v))
    angle = position * table_position_step + sample * table_sample_step + pair
    _turn(source, cos + angle, sin + angle, out + row * (2 * HALF) + pair, exists, head < turned, sign, HALF)


@functools.cache
def _variant(sources: tuple[str, ...], dtype: torch.dtype, table_dtype: torch.dtype, head_dim: int) -> Variant:
    """Of `_heads` for one source, of `_three` for three."""
    pairs = triton.next_power_of_2(head_dim // 2)
    axes = ("position_step", "sample_step", "head_step")
    steps = [f"{source}_{axis}" for source in sources for axis in axes] if len(sources) == 3 else list(axes)
    steps += ["table_position_step", "table_sample_step"]
    counts = ("rows", "batch", "q_heads", "k_heads") if len(sources) == 3 else ("rows", "batch", "heads", "turned")
    tensors = {**dict.fromkeys(sources, dtype), "cos": table_dtype, "sin": table_dtype, "out": dtype}
    return Variant(
        name=f"rotary {', '.join(sources)} {POINTER[dtype][1:]}, {head_dim} channels",
        kernel=_three if len(sources) == 3 else _heads,
        types={name: POINTER[tensor] for name, tensor in tensors.items()} | {"sign": "fp32"} | dict.fromkeys((*counts, *steps), "i32"),
        constants={"HALF": head_dim // 2, "PAIRS": pairs, "ROWS": max(TILE_BYTES // dtype.itemsize // pairs, 1)},
        warps=4,
        multiples_of_16=tuple(steps),
    )


def _launch(out: Tensor, sources: dict[str, Tensor], cos: Tensor, sin: Tensor, sign: float, counts: tuple[int, int]) -> None:
    """`out` [S, B, heads, D] from its sources, [S, B, their heads, D] each."""
    if out.numel() == 0:
        return
    tensors = [source if source.stride(-1) == 1 else source.contiguous() for source in sources.values()]
    cos, sin = cos.contiguous(), sin.contiguous()
    steps = [step for tensor in tensors for step in tensor.stride()[:3]]
    steps += [cos.stride(0), cos.stride(1) if cos.dim() == 3 else 0]
    batch, head_dim = out.shape[1], out.shape[3]
    rows = out.numel() // head_dim
    variant = _variant(tuple(sources), out.dtype, cos.dtype, head_dim)
    variant.launch((triton.cdiv(rows, variant.constants["ROWS"]),), *tensors, cos, sin, out, sign, rows, batch, *counts, *steps)


def _like_x(x: Tensor, turned: int, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    return x.new_empty(x.shape)


@operation(fake=_like_x)
def rotate_heads(x: Tensor, turned: int, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """x [S, B, heads, D] of any strides in a new buffer, the first `turned` heads turned by their positions' angles, the others copied."""
    out = _like_x(x, turned, cos, sin, inverse)
    _launch(out, {"x": x}, cos, sin, -1.0 if inverse else 1.0, (x.shape[2], turned))
    return out


def _packed(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return dq.new_empty((*dq.shape[:2], dq.shape[2] + 2 * dk.shape[2], dq.shape[3]))


@operation(fake=_packed)
def rotate_back_and_pack(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """dq [S, B, hq, D], dk and dv [S, B, hk, D] of any strides -> [S, B, hq + 2·hk, D], with dq and dk turned back."""
    packed = _packed(dq, dk, dv, cos, sin)
    _launch(packed, {"q": dq, "k": dk, "v": dv}, cos, sin, -1.0, (dq.shape[2], dk.shape[2]))
    return packed
