"""The chunked recurrences of `recurrence` in Triton: forward, the final state alone, and backward.

Chunks have 64 tokens. Products take the inputs' type and add in fp32; of fp32 inputs they are products of
fp32. The decay G within a chunk, the inversion of 1 + tril₋₁(β kkᵀ exp(Gᵢ − Gⱼ)), the state and its gradient
are fp32. The kernels:

    _prepare    T, and what follows from it without the state: U = T β v, W = T β exp(G) k
    _scan       the states, chunk after chunk, for some of the values' channels: u = U − W S
    _outputs    o of a chunk
    _within     of the gradient of u the part that comes from the chunk's own outputs
    _adjoint    the gradients of the states, from the last chunk to the first, and of u
    _pairs      gradients of the products of two tokens of a chunk, of v, and β's part of v
    _gradients  of q, k, the decay and β, for some of the keys' channels

Mamba-2 has no T, and its u is v. Backward runs the first two again. T is inverted as four blocks of 16 tokens
by elimination, which are then joined to two of 32 and to the whole.

With a decay for each channel exp(Gᵢ − Gⱼ) is no factor of the products of two tokens. For i in a later block
of 16 than j it is exp(Gᵢ − R) exp(R − Gⱼ), R being G at the first token of i's block: neither overflows.
Within a block it is computed for each pair.

Offsets of rows are 64-bit. There are no atomics: results are bitwise reproducible.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from megalite_kernels.launch import Variant, architecture, operation

CHUNK = 64
_SUB = tl.constexpr(16)  # tokens of a block


@triton.jit
def _load(base, row, stride, limit, column, WIDTH: tl.constexpr):
    """Load [rows, columns], zero where there is none."""
    at = base + row.to(tl.int64)[:, None] * stride + column[None, :]
    return tl.load(at, mask=(row < limit)[:, None] & (column < WIDTH)[None, :], other=0.0)


@triton.jit
def _store(base, row, stride, limit, column, value, WIDTH: tl.constexpr):
    at = base + row.to(tl.int64)[:, None] * stride + column[None, :]
    tl.store(at, value.to(base.dtype.element_ty), mask=(row < limit)[:, None] & (column < WIDTH)[None, :])


@triton.jit
def _number(starts, token, d_s, size, DOCUMENTS: tl.constexpr):
    """Return where each token's document starts; tokens after the last one are of its document."""
    number = token.to(tl.int64) * 0 - 1
    if DOCUMENTS:
        number = tl.load(starts + tl.minimum(token, size - 1).to(tl.int64) * d_s).to(tl.int64)
    return number


@triton.jit
def _decay(total, token, g_s, column, WIDTH: tl.constexpr, CHANNEL: tl.constexpr):
    """Load G, [tokens, 1], or [tokens, columns] where each channel has its own."""
    if CHANNEL:
        at = total + token.to(tl.int64)[:, None] * g_s + column[None, :]
        value = tl.load(at, mask=(column < WIDTH)[None, :], other=0.0)
    else:
        value = tl.load(total + token)[:, None]
    return value


@triton.jit
def _since(decay, number, first):
    """Return exp(G), zero where the state before the chunk is of another document."""
    return tl.exp(tl.where((number < first)[:, None], decay, -float("inf")))


@triton.jit
def _last(decay, number, lane, CHUNK: tl.constexpr):
    """Return G of the last token [1, columns], and the number of its document."""
    is_last = lane == CHUNK - 1
    return tl.sum(tl.where(is_last[:, None], decay, 0.0), 0)[None, :], tl.sum(tl.where(is_last, number, 0))


@triton.jit
def _pair_decay(total, token, seen):
    """Return exp(Gᵢ − Gⱼ), zero where token i does not see token j."""
    decay = tl.load(total + token)
    return tl.exp(tl.where(seen, decay[:, None] - decay[None, :], -float("inf")))


@triton.jit
def _add_products(
    sums, left, right, decay, right_at, total_at, token, lane, right_s, g_s, limit, column,
    WIDTH: tl.constexpr, CHANNEL: tl.constexpr,
):  # fmt: skip
    """Add leftᵢ · rightⱼ over some channels, times exp(Gᵢ − Gⱼ) if that depends on the channel."""
    if not CHANNEL:
        sums = tl.dot(left, tl.trans(right), sums, input_precision="ieee")
    else:
        block, first = lane // _SUB, token - lane
        left_wide, right_wide = left.to(tl.float32), right.to(tl.float32)
        dtype = left.dtype
        for own in tl.static_range(1, 4):
            reference = _decay(total_at, first + own * _SUB, g_s, column, WIDTH, CHANNEL)
            later = left_wide * tl.exp(tl.where((block == own)[:, None], decay - reference, -float("inf")))
            sooner = right_wide * tl.exp(tl.where((block < own)[:, None], reference - decay, -float("inf")))
            sums = tl.dot(later.to(dtype), tl.trans(sooner.to(dtype)), sums, input_precision="ieee")
        for place in range(_SUB):
            other = block * _SUB + place
            its = _load(right_at, first + other, right_s, limit, column, WIDTH).to(tl.float32)
            difference = decay - _decay(total_at, first + other, g_s, column, WIDTH, CHANNEL)
            its *= tl.exp(tl.where((lane >= other)[:, None], difference, -float("inf")))
            sum_of = tl.sum(left_wide * its, 1)
            sums += tl.where(lane[None, :] == other[:, None], sum_of[:, None], 0.0)
    return sums


@triton.jit
def _times_right(
    grad, right, decay, grad_at, right_at, total_at, token, lane, right_s, g_s, limit, column,
    WIDTH: tl.constexpr, CHANNEL: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Return the gradient of leftᵢ in `_add_products`; `grad` [i, j] is also at `grad_at`."""
    if not CHANNEL:
        result = tl.dot(grad, right, input_precision="ieee")
    else:
        block, first = lane // _SUB, token - lane
        right_wide, result = right.to(tl.float32), tl.zeros(right.shape, tl.float32)
        for own in tl.static_range(1, 4):
            reference = _decay(total_at, first + own * _SUB, g_s, column, WIDTH, CHANNEL)
            later = tl.exp(tl.where((block == own)[:, None], decay - reference, -float("inf")))
            sooner = right_wide * tl.exp(tl.where((block < own)[:, None], reference - decay, -float("inf")))
            result += later * tl.dot(grad, sooner.to(grad.dtype), input_precision="ieee")
        for place in range(_SUB):
            other = block * _SUB + place
            its = _load(right_at, first + other, right_s, limit, column, WIDTH).to(tl.float32)
            difference = decay - _decay(total_at, first + other, g_s, column, WIDTH, CHANNEL)
            its *= tl.exp(tl.where((lane >= other)[:, None], difference, -float("inf")))
            result += tl.load(grad_at + token.to(tl.int64) * CHUNK + other).to(tl.float32)[:, None] * its
    return result


@triton.jit
def _times_left(
    grad, left, decay, grad_at, left_at, scale_at, total_at, token, lane, left_s, g_s, limit, column,
    WIDTH: tl.constexpr, CHANNEL: tl.constexpr, SCALED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Return the gradient of rightⱼ in `_add_products`; `left` is what is at `left_at`, `SCALED` times β."""
    if not CHANNEL:
        result = tl.dot(tl.trans(grad), left, input_precision="ieee")
    else:
        block, first = lane // _SUB, token - lane
        left_wide, result = left.to(tl.float32), tl.zeros(left.shape, tl.float32)
        for own in tl.static_range(1, 4):
            reference = _decay(total_at, first + own * _SUB, g_s, column, WIDTH, CHANNEL)
            later = left_wide * tl.exp(tl.where((block == own)[:, None], decay - reference, -float("inf")))
            sooner = tl.exp(tl.where((block < own)[:, None], reference - decay, -float("inf")))
            result += sooner * tl.dot(tl.trans(grad), later.to(grad.dtype), input_precision="ieee")
        for place in range(_SUB):
            other = block * _SUB + place
            its = _load(left_at, first + other, left_s, limit, column, WIDTH).to(tl.float32)
            if SCALED:
                its *= tl.load(scale_at + (first + other))[:, None]
            difference = _decay(total_at, first + other, g_s, column, WIDTH, CHANNEL) - decay
            its *= tl.exp(tl.where((other >= lane)[:, None], difference, -float("inf")))
            at = grad_at + (first + other).to(tl.int64) * CHUNK + lane
            result += tl.load(at).to(tl.float32)[:, None] * its
    return result


@triton.jit
def _inverse(lower):
    """Return (1 + lower)⁻¹ of a strictly lower triangular matrix [64, 64]."""
    pair, place = tl.arange(0, 2), tl.arange(0, 16)
    left, right = pair[:, None, None, None], pair[None, None, :, None]
    blocks = tl.reshape(lower, (2, 32, 2, 32))
    halves = tl.sum(tl.where(left == right, blocks, 0.0), 2)
    corner = tl.sum(tl.sum(tl.where(left > right, blocks, 0.0), 2), 0)
    above, beside = pair[None, :, None, None, None], pair[None, None, None, :, None]
    quarters = tl.reshape(halves, (2, 2, 16, 2, 16))
    diagonal = tl.reshape(tl.sum(tl.where(above == beside, quarters, 0.0), 3), (4, 16, 16))
    corners = tl.sum(tl.sum(tl.where(above > beside, quarters, 0.0), 3), 1)
    unit = (place[None, :, None] == place[None, None, :]).to(tl.float32)
    inverse = unit + tl.zeros((4, 16, 16), tl.float32)
    for step in range(15):
        column = tl.sum(tl.where(place[None, None, :] == step, diagonal, 0.0), 2)
        row = tl.sum(tl.where(place[None, :, None] == step, inverse, 0.0), 1)
        inverse -= column[:, :, None] * row[:, None, :]
    four = tl.reshape(inverse, (2, 2, 16, 16))
    of_pair = pair[None, :, None, None]
    upper, under = tl.sum(tl.where(of_pair == 0, four, 0.0), 1), tl.sum(tl.where(of_pair == 1, four, 0.0), 1)
    product = tl.dot(corners, upper, input_precision="ieee")
    corners = -tl.dot(under, product, input_precision="ieee")
    joined = tl.where(above > beside, corners[:, None, :, None, :], 0.0)
    halves = tl.reshape(tl.where(above == beside, four[:, :, :, None, :], joined), (2, 32, 32))
    of_half = pair[:, None, None]
    upper, under = (
        tl.sum(tl.where(of_half == 0, halves, 0.0), 0),
        tl.sum(tl.where(of_half == 1, halves, 0.0), 0),
    )
    product = tl.dot(corner, upper, input_precision="ieee")
    corner = -tl.dot(under, product, input_precision="ieee")
    joined = tl.where(left > right, corner[None, :, None, :], 0.0)
    return tl.reshape(tl.where(left == right, halves[:, :, None, :], joined), (64, 64))


@triton.jit(do_not_specialize=["d_s", "d_b", "size"])
def _prepare(
    k, v, total, beta, starts, inverse, u, w,
    k_s, k_b, k_h, v_s, v_b, v_h, g_s, g_b, g_h, d_s, d_b, size,
    CHANNEL: tl.constexpr, DOCUMENTS: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr,
    DK: tl.constexpr, BK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    lane, first = tl.arange(0, CHUNK), tl.program_id(0) * CHUNK
    token, length = first + lane, tl.num_programs(0) * CHUNK
    own = (row * tl.num_programs(1) + head) * length
    k, v = k + row * k_b + head // GROUP * k_h, v + row * v_b + head * v_h
    total += row * g_b + head * g_h
    dtype = k.dtype.element_ty
    strength = tl.load(beta + own + token)[:, None]
    number = _number(starts + row * d_b, token, d_s, size, DOCUMENTS)
    seen = (number[:, None] == number[None, :]) & (lane[:, None] > lane[None, :])
    sums = tl.zeros((CHUNK, CHUNK), tl.float32)
    for at in range(0, DK, BK):
        column = at + tl.arange(0, BK)
        keys = _load(k, token, k_s, size, column, DK)
        decay = _decay(total, token, g_s, column, DK, CHANNEL)
        sums = _add_products(
            sums, keys, keys, decay, k, total, token, lane, k_s, g_s, size, column, DK, CHANNEL
        )  # fmt: skip
    sums = tl.where(seen, sums, 0.0) * strength
    if not CHANNEL:
        sums *= _pair_decay(total, token, seen)
    solving = _inverse(sums).to(dtype)
    _store(inverse + own * CHUNK, token, CHUNK, length, lane, solving, CHUNK)
    for at in range(0, DV, BV):
        column = at + tl.arange(0, BV)
        values = _load(v, token, v_s, size, column, DV).to(tl.float32) * strength
        _store(
            u + own * DV,
            token,
            DV,
            length,
            column,
            tl.dot(solving, values.to(dtype), input_precision="ieee"),
            DV,
        )
    for at in range(0, DK, BK):
        column = at + tl.arange(0, BK)
        keys = _load(k, token, k_s, size, column, DK).to(tl.float32) * strength
        keys *= _since(_decay(total, token, g_s, column, DK, CHANNEL), number, first)
        _store(
            w + own * DK,
            token,
            DK,
            length,
            column,
            tl.dot(solving, keys.to(dtype), input_precision="ieee"),
            DK,
        )


@triton.jit(do_not_specialize=["d_s", "d_b", "size", "count"])
def _scan(
    k, u, w, total, starts, initial, states, kept_values, final,
    k_s, k_b, k_h, u_s, u_b, u_h, g_s, g_b, g_h, d_s, d_b, size, count,
    DELTA: tl.constexpr, INITIAL: tl.constexpr, KEEP: tl.constexpr,
    CHANNEL: tl.constexpr, DOCUMENTS: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr,
    DK: tl.constexpr, WK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    lane, channel = tl.arange(0, CHUNK), tl.arange(0, WK)
    column, own = tl.program_id(0) * BV + tl.arange(0, BV), row * tl.num_programs(1) + head
    k, u = k + row * k_b + head // GROUP * k_h, u + row * u_b + head * u_h
    total, starts = total + row * g_b + head * g_h, starts + row * d_b
    dtype = k.dtype.element_ty
    length = count * CHUNK
    w, kept_values = w + own * length * DK, kept_values + own * length * DV
    state = tl.zeros((WK, BV), tl.float32)
    if INITIAL:
        state = _load(initial + own * (DK * DV), channel, DV, DK, column, DV)
    for chunk in range(count):
        first = chunk * CHUNK
        token = first + lane
        if KEEP:
            before = states + (own * count + chunk) * (DK * DV)
            _store(before, channel, DV, DK, column, state, DV)
        values = _load(u, token, u_s, size, column, DV)
        if DELTA:
            erasing = _load(w, token, DK, length, channel, DK)
            erased = tl.dot(erasing, state.to(dtype), input_precision="ieee")
            values = (values.to(tl.float32) - erased).to(dtype)
            if KEEP:
                _store(kept_values, token, DV, length, column, values, DV)
        number = _number(starts, token, d_s, size, DOCUMENTS)
        decay = _decay(total, token, g_s, channel, DK, CHANNEL)
        last, document = _last(decay, number, lane, CHUNK)
        to_end = tl.exp(tl.where((number == document)[:, None], last - decay, -float("inf")))
        keys = _load(k, token, k_s, size, channel, DK)
        if CHANNEL:
            keys = (keys.to(tl.float32) * to_end).to(dtype)
        else:
            values = (values.to(tl.float32) * to_end).to(dtype)
        kept = tl.exp(tl.where(document < first, last, -float("inf")))
        added = tl.dot(tl.trans(keys), values, input_precision="ieee")
        state = state * tl.trans(kept) + added
    _store(final + own * (DK * DV), channel, DV, DK, column, state, DV)


@triton.jit(do_not_specialize=["d_s", "d_b", "size"])
def _outputs(
    q, k, u, total, starts, states, out,
    q_s, q_b, q_h, k_s, k_b, k_h, u_s, u_b, u_h, g_s, g_b, g_h, d_s, d_b, size,
    CHANNEL: tl.constexpr, DOCUMENTS: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr,
    DK: tl.constexpr, BK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    across: tl.constexpr = (DV + BV - 1) // BV
    chunk, count = tl.program_id(0) // across, tl.num_programs(0) // across
    head, row = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    heads, batch = tl.num_programs(1), tl.num_programs(2)
    lane, first = tl.arange(0, CHUNK), chunk * CHUNK
    token, value = first + lane, tl.program_id(0) % across * BV + tl.arange(0, BV)
    q, k = q + row * q_b + head // GROUP * q_h, k + row * k_b + head // GROUP * k_h
    total += row * g_b + head * g_h
    dtype = k.dtype.element_ty
    number = _number(starts + row * d_b, token, d_s, size, DOCUMENTS)
    states += ((row * heads + head) * count + chunk) * (DK * DV)
    scores = tl.zeros((CHUNK, CHUNK), tl.float32)
    result = tl.zeros((CHUNK, BV), tl.float32)
    for at in range(0, DK, BK):
        column = at + tl.arange(0, BK)
        queries = _load(q, token, q_s, size, column, DK)
        keys = _load(k, token, k_s, size, column, DK)
        decay = _decay(total, token, g_s, column, DK, CHANNEL)
        scores = _add_products(
            scores, queries, keys, decay, k, total, token, lane, k_s, g_s, size, column, DK, CHANNEL
        )  # fmt: skip
        if CHANNEL:
            queries = (queries.to(tl.float32) * _since(decay, number, first)).to(dtype)
        state = _load(states, column, DV, DK, value, DV)
        result = tl.dot(queries, state, result, input_precision="ieee")
    seen = (number[:, None] == number[None, :]) & (lane[:, None] >= lane[None, :])
    scores = tl.where(seen, scores, 0.0)
    if not CHANNEL:
        scores *= _pair_decay(total, token, seen)
        result *= _since(_decay(total, token, g_s, value, DV, CHANNEL), number, first)
    values = _load(u + row * u_b + head * u_h, token, u_s, size, value, DV)
    result = tl.dot(scores.to(dtype), values, result, input_precision="ieee")
    _store(out + (row * heads + head) * DV, token, batch * heads * DV, size, value, result, DV)


@triton.jit(do_not_specialize=["d_s", "d_b", "size"])
def _within(
    q, k, dout, total, starts, du,
    q_s, q_b, q_h, k_s, k_b, k_h, g_s, g_b, g_h, d_s, d_b, size,
    CHANNEL: tl.constexpr, DOCUMENTS: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr,
    DK: tl.constexpr, BK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    heads, batch = tl.num_programs(1), tl.num_programs(2)
    lane, first = tl.arange(0, CHUNK), tl.program_id(0) * CHUNK
    token, length = first + lane, tl.num_programs(0) * CHUNK
    q, k = q + row * q_b + head // GROUP * q_h, k + row * k_b + head // GROUP * k_h
    total += row * g_b + head * g_h
    dtype = k.dtype.element_ty
    number = _number(starts + row * d_b, token, d_s, size, DOCUMENTS)
    seen = (number[:, None] == number[None, :]) & (lane[:, None] >= lane[None, :])
    scores = tl.zeros((CHUNK, CHUNK), tl.float32)
    for at in range(0, DK, BK):
        column = at + tl.arange(0, BK)
        queries = _load(q, token, q_s, size, column, DK)
        keys = _load(k, token, k_s, size, column, DK)
        decay = _decay(total, token, g_s, column, DK, CHANNEL)
        scores = _add_products(
            scores, queries, keys, decay, k, total, token, lane, k_s, g_s, size, column, DK, CHANNEL
        )  # fmt: skip
    scores = tl.where(seen, scores, 0.0)
    if not CHANNEL:
        scores *= _pair_decay(total, token, seen)
    transposed = tl.trans(scores.to(dtype))
    own = row * heads + head
    for at in range(0, DV, BV):
        column = at + tl.arange(0, BV)
        grad = _load(dout + own * DV, token, batch * heads * DV, size, column, DV)
        result = tl.dot(transposed, grad, input_precision="ieee")
        _store(du + own * length * DV, token, DV, length, column, result, DV)


@triton.jit(do_not_specialize=["d_s", "d_b", "size", "count"])
def _adjoint(
    q, k, w, dout, within, total, starts, dfinal, after, du, dinitial,
    q_s, q_b, q_h, k_s, k_b, k_h, u_s, u_b, u_h, g_s, g_b, g_h, d_s, d_b, size, count,
    DELTA: tl.constexpr, FINAL: tl.constexpr,
    CHANNEL: tl.constexpr, DOCUMENTS: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr,
    DK: tl.constexpr, WK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    heads, batch = tl.num_programs(1), tl.num_programs(2)
    lane, channel = tl.arange(0, CHUNK), tl.arange(0, WK)
    column, own = tl.program_id(0) * BV + tl.arange(0, BV), row * heads + head
    q, k = q + row * q_b + head // GROUP * q_h, k + row * k_b + head // GROUP * k_h
    total, starts = total + row * g_b + head * g_h, starts + row * d_b
    dtype = k.dtype.element_ty
    length = count * CHUNK
    w, within, dout, du = (
        w + own * length * DK,
        within + own * length * DV,
        dout + own * DV,
        du + row * u_b + head * u_h,
    )
    dstate = tl.zeros((WK, BV), tl.float32)
    if FINAL:
        dstate = _load(dfinal + own * (DK * DV), channel, DV, DK, column, DV)
    for step in range(count):
        chunk = count - 1 - step
        first = chunk * CHUNK
        token = first + lane
        _store(after + (own * count + chunk) * (DK * DV), channel, DV, DK, column, dstate, DV)
        number = _number(starts, token, d_s, size, DOCUMENTS)
        decay = _decay(total, token, g_s, channel, DK, CHANNEL)
        last, document = _last(decay, number, lane, CHUNK)
        to_end = tl.exp(tl.where((number == document)[:, None], last - decay, -float("inf")))
        keys = _load(k, token, k_s, size, channel, DK)
        if CHANNEL:
            keys = (keys.to(tl.float32) * to_end).to(dtype)
        from_state = tl.dot(keys, dstate.to(dtype), input_precision="ieee")
        if not CHANNEL:
            from_state *= to_end
        dvalues = (_load(within, token, DV, length, column, DV).to(tl.float32) + from_state).to(dtype)
        _store(du, token, u_s, size, column, dvalues, DV)
        kept = tl.exp(tl.where(document < first, last, -float("inf")))
        queries = _load(q, token, q_s, size, channel, DK)
        grad, since = _load(dout, token, batch * heads * DV, size, column, DV), _since(decay, number, first)
        if CHANNEL:
            queries = (queries.to(tl.float32) * since).to(dtype)
        else:
            grad = (grad.to(tl.float32) * since).to(dtype)
        dstate = tl.dot(tl.trans(queries), grad, dstate * tl.trans(kept), input_precision="ieee")
        if DELTA:
            erasing = _load(w, token, DK, length, channel, DK)
            dstate -= tl.dot(tl.trans(erasing), dvalues, input_precision="ieee")
    _store(dinitial + own * (DK * DV), channel, DV, DK, column, dstate, DV)


@triton.jit(do_not_specialize=["d_s", "d_b", "size"])
def _pairs(
    v, u, du, dout, inverse, total, beta, starts, dright, dv, dscores, dreplaced, dbeta,
    v_s, v_b, v_h, u_s, u_b, u_h, g_s, g_b, g_h, d_s, d_b, size,
    DELTA: tl.constexpr,
    CHANNEL: tl.constexpr, DOCUMENTS: tl.constexpr, CHUNK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    heads, batch = tl.num_programs(1), tl.num_programs(2)
    lane, first = tl.arange(0, CHUNK), tl.program_id(0) * CHUNK
    token, length = first + lane, tl.num_programs(0) * CHUNK
    rank = row * heads + head
    own = rank * length
    dtype = dout.dtype.element_ty
    v, u, total = v + row * v_b + head * v_h, u + row * u_b + head * u_h, total + row * g_b + head * g_h
    number = _number(starts + row * d_b, token, d_s, size, DOCUMENTS)
    seen = (number[:, None] == number[None, :]) & (lane[:, None] >= lane[None, :])
    scores = tl.zeros((CHUNK, CHUNK), tl.float32)
    if DELTA:
        solving = tl.trans(_load(inverse + own * CHUNK, token, CHUNK, length, lane, CHUNK))
        strength = tl.load(beta + own + token)
        replaced = tl.zeros((CHUNK, CHUNK), tl.float32)
        along = tl.zeros((CHUNK,), tl.float32)
    for at in range(0, DV, BV):
        column = at + tl.arange(0, BV)
        grad = _load(dout + rank * DV, token, batch * heads * DV, size, column, DV)
        values = tl.trans(_load(u, token, u_s, size, column, DV))
        scores = tl.dot(grad, values, scores, input_precision="ieee")
        if DELTA:
            dvalues = _load(du + own * DV, token, DV, size, column, DV)
            right = tl.dot(solving, dvalues, input_precision="ieee")
            _store(dright + own * DV, token, DV, length, column, right, DV)
            _store(dv + rank * DV, token, batch * heads * DV, size, column, right * strength[:, None], DV)
            along += tl.sum(right * _load(v, token, v_s, size, column, DV).to(tl.float32), 1)
            replaced = tl.dot(right.to(dtype), values, replaced, input_precision="ieee")
    scores = tl.where(seen, scores, 0.0)
    if not CHANNEL:
        between = _pair_decay(total, token, seen)
        scores *= between
    _store(dscores + own * CHUNK, token, CHUNK, length, lane, scores, CHUNK)
    if DELTA:
        replaced = tl.where(seen & (lane[:, None] > lane[None, :]), -replaced, 0.0)
        if not CHANNEL:
            replaced *= between
        _store(dreplaced + own * CHUNK, token, CHUNK, length, lane, replaced, CHUNK)
        tl.store(dbeta + own + token, along)


@triton.jit(do_not_specialize=["d_s", "d_b", "size"])
def _gradients(
    q, k, u, dright, dout, states, after, dscores, dreplaced, total, beta, starts, dq, dk, dg, dbeta,
    q_s, q_b, q_h, k_s, k_b, k_h, u_s, u_b, u_h, g_s, g_b, g_h, d_s, d_b, size,
    DELTA: tl.constexpr,
    CHANNEL: tl.constexpr, DOCUMENTS: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr,
    DK: tl.constexpr, BK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    across: tl.constexpr = (DK + BK - 1) // BK
    chunk, count = tl.program_id(0) // across, tl.num_programs(0) // across
    part = tl.program_id(0) % across
    head, row = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    heads, batch = tl.num_programs(1), tl.num_programs(2)
    lane, first, length = tl.arange(0, CHUNK), chunk * CHUNK, count * CHUNK
    token, column, rank = first + lane, part * BK + tl.arange(0, BK), row * heads + head
    own, line = rank * length, batch * heads
    dtype = k.dtype.element_ty
    q, k, u = (
        q + row * q_b + head // GROUP * q_h,
        k + row * k_b + head // GROUP * k_h,
        u + row * u_b + head * u_h,
    )
    total, beta = total + row * g_b + head * g_h, beta + own
    states, after = states + (rank * count + chunk) * (DK * DV), after + (rank * count + chunk) * (DK * DV)
    dscores, dreplaced = dscores + own * CHUNK, dreplaced + own * CHUNK
    through = tl.zeros((CHUNK, BK), tl.float32)  # the state before the chunk, to q
    to_state = tl.zeros((CHUNK, BK), tl.float32)  # the state after it, to k
    from_right = tl.zeros((CHUNK, BK), tl.float32)
    both = tl.zeros((BK,), tl.float32)
    for at in range(0, DV, BV):
        value = at + tl.arange(0, BV)
        state, later = _load(states, column, DV, DK, value, DV), _load(after, column, DV, DK, value, DV)
        grad = _load(dout + rank * DV, token, line * DV, size, value, DV)
        through = tl.dot(grad, tl.trans(state), through, input_precision="ieee")
        to_state = tl.dot(
            _load(u, token, u_s, size, value, DV), tl.trans(later), to_state, input_precision="ieee"
        )  # fmt: skip
        if DELTA:
            right = _load(dright + own * DV, token, DV, length, value, DV)
            from_right = tl.dot(right, tl.trans(state), from_right, input_precision="ieee")
        both += tl.sum(state.to(tl.float32) * later.to(tl.float32), 1)
    number = _number(starts + row * d_b, token, d_s, size, DOCUMENTS)
    decay = _decay(total, token, g_s, column, DK, CHANNEL)
    last, document = _last(decay, number, lane, CHUNK)
    to_state *= tl.exp(tl.where((number == document)[:, None], last - decay, -float("inf")))
    since = _since(decay, number, first)
    queries, keys = _load(q, token, q_s, size, column, DK), _load(k, token, k_s, size, column, DK)
    queries_wide, keys_wide = queries.to(tl.float32), keys.to(tl.float32)
    grad = _load(dscores, token, CHUNK, length, lane, CHUNK)
    result = through * since + _times_right(
        grad, keys, decay, dscores, k, total, token, lane, k_s, g_s, size, column, DK, CHANNEL, CHUNK
    )  # fmt: skip
    _store(dq + rank * DK, token, line * DK, size, column, result, DK)
    dtotal = queries_wide * result
    result = to_state + _times_left(
        grad, queries, decay, dscores, q, beta, total, token, lane, q_s, g_s, size, column,
        DK, CHANNEL, False, CHUNK,
    )  # fmt: skip
    dtotal -= keys_wide * result
    # where G of the last token is a factor of all that is written
    kept = tl.exp(tl.where(document < first, last, -float("inf")))
    at_last = tl.sum(keys_wide * to_state, 0) + tl.sum(both[None, :] * kept, 0)
    if DELTA:
        strength = tl.load(beta + token)[:, None]
        grad = _load(dreplaced, token, CHUNK, length, lane, CHUNK)
        of_own = _times_right(
            grad, keys, decay, dreplaced, k, total, token, lane, k_s, g_s, size, column, DK, CHANNEL, CHUNK
        )  # fmt: skip
        of_own -= from_right * since
        tl.store(dbeta + part * (line * length) + own + token, tl.sum(keys_wide * of_own, 1))
        of_other = _times_left(
            grad, (keys_wide * strength).to(dtype), decay, dreplaced, k, beta, total, token, lane,
            k_s, g_s, size, column, DK, CHANNEL, True, CHUNK,
        )  # fmt: skip
        of_own *= strength
        dtotal += keys_wide * (of_own - of_other)
        result += of_own + of_other
    _store(dk + rank * DK, token, line * DK, size, column, result, DK)
    # G is a cumulative sum: its gradient is summed from the end
    if CHANNEL:
        dtotal = tl.cumsum(dtotal, 0, reverse=True) + at_last[None, :]
        _store(dg + rank * DK, token, line * DK, size, column, dtotal, DK)
    else:
        by_token = tl.cumsum(tl.sum(dtotal, 1), 0, reverse=True) + tl.sum(at_last)
        tl.store(dg + part * (line * length) + own + token, by_token)


class RecurrenceTile(NamedTuple):
    """How a kernel is compiled."""

    keys: int  # channels of keys at a time; the scans have all
    values: int  # channels of values at a time
    warps: int
    stages: int


TILES = {
    "_prepare": {
        "": RecurrenceTile(64, 64, 8, 1),
        "sm_90": RecurrenceTile(64, 64, 4, 1),
        "channel": RecurrenceTile(64, 64, 8, 1),
    },
    "_scan": {
        **{
            "": RecurrenceTile(0, 32, 8, 2),
            "sm_90": RecurrenceTile(0, 32, 4, 3),
            "gfx942": RecurrenceTile(0, 32, 8, 1),
        },
        **{"wide": RecurrenceTile(0, 16, 8, 2), "gfx942 wide": RecurrenceTile(0, 16, 8, 1)},
    },
    "_outputs": {"": RecurrenceTile(64, 64, 4, 2), "channel": RecurrenceTile(64, 64, 8, 1)},
    "_within": {"": RecurrenceTile(64, 64, 4, 2), "channel": RecurrenceTile(64, 64, 8, 1)},
    "_adjoint": {
        **{"": RecurrenceTile(0, 32, 8, 2), "gfx942": RecurrenceTile(0, 32, 8, 1)},
        **{"channel": RecurrenceTile(0, 32, 8, 1), "wide": RecurrenceTile(0, 16, 8, 1)},
    },
    "_pairs": {
        "": RecurrenceTile(0, 64, 8, 1),
        "sm_80": RecurrenceTile(0, 32, 8, 1),
        "sm_90": RecurrenceTile(0, 64, 4, 1),
    },
    "_gradients": {
        **{"": RecurrenceTile(32, 64, 8, 1), "sm_80 channel": RecurrenceTile(16, 64, 8, 1)},
        "gfx942 channel": RecurrenceTile(16, 64, 8, 1),
    },
}
"""Kernel → its tiles: for a decay of each channel, for the scans of keys of more than 128 channels, and for
all else; with an architecture before the kind, for that alone."""


def _tile(kernel: str, target: str, channel: bool, dk: int) -> RecurrenceTile:
    tiles = TILES[kernel]
    kind = "wide" if kernel in ("_scan", "_adjoint") and dk > 128 else "channel" if channel else ""
    names = f"{target} {kind}".strip(), kind, target
    return next((tiles[name] for name in names if name in tiles), tiles[""])


@functools.cache
def _variant(kernel: str, target: str, dk: int, options: tuple[tuple[str, Any], ...]) -> Variant:
    """Return the kernel with its tile; options are its constants besides the sizes of the tile."""
    constants = dict(options)
    tile = _tile(kernel, target, constants["CHANNEL"], dk)
    constants |= {"CHUNK": CHUNK, "BV": min(tile.values, _padded(constants["DV"]))}
    if "DK" in constants:
        constants |= {"BK": min(tile.keys, _padded(dk))} if tile.keys else {"WK": _padded(dk)}
    return Variant(globals()[kernel], constants, tile.warps, tile.stages)


def _padded(width: int) -> int:
    return max(16, triton.next_power_of_2(width))


class _RunOfTokens(NamedTuple):
    """The inputs of a run of positions as the kernels read them."""

    q: Tensor
    k: Tensor
    v: Tensor
    total: Tensor  # G: [batch, heads, tokens of all chunks], or [tokens of all chunks, batch, heads, dk]
    beta: Tensor | None  # [batch, heads, tokens of all chunks] fp32
    starts: Tensor | None

    @property
    def chunks(self) -> int:
        """The number of chunks."""
        return -(-len(self.v) // CHUNK)

    @property
    def channel(self) -> bool:
        return self.total.ndim == 4

    def launch(self, kernel: str, grid: int, *args: Any, **constants: bool) -> None:
        """Run `grid` programs for each head."""
        batch, heads, dv = self.v.shape[1:]
        options: dict[str, Any] = {**constants, "CHANNEL": self.channel, "DV": dv}
        options |= {"DOCUMENTS": self.starts is not None}
        dk = self.k.shape[3]
        if kernel != "_pairs":
            options |= {"GROUP": heads // self.k.shape[2], "DK": dk}
        variant = _variant(kernel, architecture(self.v.device), dk, tuple(options.items()))
        variant.launch((grid, heads, batch), *args)

    def blocks(self, kernel: str) -> int:
        """Return the number of tiles that a head's values, or for `_gradients` its keys, have."""
        dk, dv = self.k.shape[3], self.v.shape[3]
        tile = _tile(kernel, architecture(self.v.device), self.channel, dk)
        return triton.cdiv(dk, tile.keys) if kernel == "_gradients" else triton.cdiv(dv, tile.values)

    def steps(self) -> list[int]:
        """Return the strides of G and of the starts, and the number of tokens."""
        by_row = self.total.stride()
        of_total = by_row[:3] if self.channel else (0, *by_row[:2])  # tokens lie next to each other
        starts = self.v if self.starts is None else self.starts
        return [*of_total, starts.stride(0), starts.stride(1) if starts.shape[1] > 1 else 0, len(self.v)]

    def space(self, width: int) -> Tensor:
        """Return memory for values of each token and head, [batch, heads, tokens of all chunks, width]."""
        batch, heads = self.v.shape[1:3]
        return self.v.new_empty(batch, heads, self.chunks * CHUNK, width)

    def space_of_states(self) -> Tensor:
        batch, heads, dv = self.v.shape[1:]
        return self.v.new_empty(batch, heads, self.chunks, self.k.shape[3], dv)


class _ScannedStates(NamedTuple):
    """What `_scan` leaves: the states before the chunks, and what is added under each key."""

    states: Tensor
    values: Tensor  # u, or v without β
    steps: list[int]  # strides of the values
    final: Tensor


def _run_of(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, starts: Tensor | None
) -> _RunOfTokens:
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    missing = -len(v) % CHUNK
    g = g.float()
    if g.ndim == 4:
        total = F.pad(g, (0, 0, 0, 0, 0, 0, 0, missing)).unflatten(0, (-1, CHUNK)).cumsum(1).flatten(0, 1)
    else:
        total = F.pad(g.permute(1, 2, 0), (0, missing)).unflatten(2, (-1, CHUNK)).cumsum(3).flatten(2)
    if beta is not None:
        beta = F.pad(beta.float().permute(1, 2, 0), (0, missing)).contiguous()
    return _RunOfTokens(q, k, v, total.contiguous(), beta, starts)


def _steps(*tensors: Tensor) -> list[int]:
    return [step for x in tensors for step in x.stride()[:3]]


def _by_head(x: Tensor) -> list[int]:
    """Return the strides of a token, a row and a head in [batch, heads, tokens, width]."""
    return [x.stride(2), x.stride(0), x.stride(1)]


def _solved(run: _RunOfTokens) -> tuple[Tensor, Tensor, Tensor]:
    """Return T, U and W."""
    inverse, u, w = run.space(CHUNK), run.space(run.v.shape[3]), run.space(run.k.shape[3])
    starts = run.v if run.starts is None else run.starts
    tensors = run.k, run.v, run.total, run.beta, starts, inverse, u, w
    run.launch("_prepare", run.chunks, *tensors, *_steps(run.k, run.v), *run.steps())
    return inverse, u, w


def _scanned(
    run: _RunOfTokens, u: Tensor | None, w: Tensor | None, initial: Tensor | None, keep: bool
) -> _ScannedStates:
    batch, heads, dv = run.v.shape[1:]
    final = run.v.new_empty(batch, heads, run.k.shape[3], dv, dtype=torch.float32)
    states = run.space_of_states() if keep else run.v
    values = run.space(dv) if keep and u is not None else run.v
    source, steps = (run.v, _steps(run.v)) if u is None else (u, _by_head(u))
    starts = run.v if run.starts is None else run.starts
    before = final if initial is None else initial.float().contiguous()
    tensors = run.k, source, run.v if w is None else w, run.total, starts, before, states, values, final
    constants = {"DELTA": u is not None, "INITIAL": initial is not None, "KEEP": keep}
    numbers = *_steps(run.k), *steps, *run.steps(), run.chunks
    run.launch("_scan", run.blocks("_scan"), *tensors, *numbers, **constants)
    return _ScannedStates(states, values, steps if u is None else _by_head(values), final)


def _like_outputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    starts: Tensor | None,
    initial: Tensor | None,
) -> tuple[Tensor, Tensor]:
    batch, heads, dv = v.shape[1:]
    return v.new_empty(v.shape), v.new_empty(batch, heads, k.shape[3], dv, dtype=torch.float32)


@operation(fake=_like_outputs)
def recurrence_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    starts: Tensor | None,
    initial: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the outputs [seq, batch, heads, dv], and the state after the last token in fp32.

    The arguments are the fields of `recurrence.Tokens`, and the state before the first token.
    """
    run, out = _run_of(q, k, v, g, beta, starts), v.new_empty(v.shape)
    _, u, w = (None, None, None) if beta is None else _solved(run)
    scanned = _scanned(run, u, w, initial, True)
    starts = run.v if starts is None else starts
    tensors = run.q, run.k, scanned.values, run.total, starts, scanned.states, out
    numbers = *_steps(run.q, run.k), *scanned.steps, *run.steps()
    run.launch("_outputs", run.chunks * run.blocks("_outputs"), *tensors, *numbers)
    return out, scanned.final


def _like_state(
    k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, starts: Tensor | None, initial: Tensor | None
) -> Tensor:
    return _like_outputs(k, k, v, g, beta, starts, initial)[1]


@operation(fake=_like_state)
def recurrence_state(
    k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, starts: Tensor | None, initial: Tensor | None
) -> Tensor:
    """Return the state after the last token, as `recurrence_forward` does."""
    run = _run_of(k, k, v, g, beta, starts)
    _, u, w = (None, None, None) if beta is None else _solved(run)
    return _scanned(run, u, w, initial, False).final


def _like_gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    starts: Tensor | None,
    initial: Tensor | None,
    dfinal: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    shapes = [x.new_empty(x.shape) for x in (q, k, v, g)]
    dbeta = g.new_empty(0) if beta is None else beta.new_empty(beta.shape)
    return *shapes, dbeta, _like_outputs(q, k, v, g, beta, starts, initial)[1]  # type: ignore[return-value]


@operation(fake=_like_gradients)
def recurrence_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    starts: Tensor | None,
    initial: Tensor | None,
    dfinal: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, g, β (empty without) and the state before the first token.

    The other arguments are as in `recurrence_forward`.
    """
    run, dout, delta = _run_of(q, k, v, g, beta, starts), dout.contiguous(), beta is not None
    inverse, u, w = _solved(run) if delta else (None, None, None)
    scanned = _scanned(run, u, w, initial, True)
    size, batch, heads, dv = v.shape
    dk, parts = k.shape[3], run.blocks("_gradients")
    where = run.v if starts is None else starts
    after, within = run.space_of_states(), run.space(dv)
    of_keys, of_scan = _steps(run.q, run.k), run.steps()
    run.launch("_within", run.chunks, run.q, run.k, dout, run.total, where, within, *of_keys, *of_scan)
    dvalues = v.new_empty(v.shape)
    du, of_du = (run.space(dv), _by_head(within)) if delta else (dvalues, _steps(dvalues))
    dinitial = torch.empty_like(scanned.final)
    last = dinitial if dfinal is None else dfinal.float().contiguous()
    tensors = (
        run.q,
        run.k,
        run.v if w is None else w,
        dout,
        within,
        run.total,
        where,
        last,
        after,
        du,
        dinitial,
    )
    numbers = *of_keys, *of_du, *of_scan, run.chunks
    constants = {"DELTA": delta, "FINAL": dfinal is not None}
    run.launch("_adjoint", run.blocks("_adjoint"), *tensors, *numbers, **constants)

    dscores = run.space(CHUNK)
    dreplaced = run.space(CHUNK) if delta else dscores
    dright = within if u is None else u  # without β nothing reads it
    dbeta = (
        dout.new_empty(parts + 1, batch, heads, run.chunks * CHUNK, dtype=torch.float32)
        if delta
        else dinitial
    )
    strength = run.total if run.beta is None else run.beta
    solving = dscores if inverse is None else inverse
    of_values = run.v, scanned.values, du, dout, solving, run.total, strength, where
    results = dright, dvalues, dscores, dreplaced, dbeta[parts] if delta else dbeta
    numbers = *_steps(run.v), *scanned.steps, *of_scan
    run.launch("_pairs", run.chunks, *of_values, *results, *numbers, DELTA=delta)

    of_queries, of_key = (v.new_empty(size, batch, heads, dk) for _ in range(2))
    shape = (size, batch, heads, dk) if run.channel else (parts, batch, heads, run.chunks * CHUNK)
    dg = dout.new_empty(shape, dtype=torch.float32)
    inputs = run.q, run.k, scanned.values, dright, dout, scanned.states, after, dscores, dreplaced
    more = run.total, strength, where, of_queries, of_key, dg, dbeta
    numbers = *of_keys, *scanned.steps, *of_scan
    run.launch("_gradients", run.chunks * parts, *inputs, *more, *numbers, DELTA=delta)
    if not run.channel:
        dg = dg.sum(0)[..., :size].permute(2, 0, 1).contiguous()
    key_heads = k.shape[2]
    of_queries, of_key = (
        x if key_heads == heads else x.unflatten(2, (key_heads, -1)).sum(3) for x in (of_queries, of_key)
    )
    if beta is None:
        return of_queries, of_key, dvalues, dg.to(g.dtype), g.new_empty(0), dinitial
    total = dbeta.sum(0)[..., :size].permute(2, 0, 1).contiguous()
    return of_queries, of_key, dvalues, dg.to(g.dtype), total.to(beta.dtype), dinitial
