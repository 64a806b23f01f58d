"""The causal convolution with SiLU in one pass over memory: the functions of `causal_conv`.

A channel has up to four weights. A program has a tile of tokens and channels, and reads the tokens before it
again: they come from the cache. In backward a token's gradient needs the output of the K − 1 tokens after it,
which are computed again. Values read and written per element: forward 2, backward 3. A token of another
document is not loaded.

The gradients of weight and bias are sums over tokens: a program goes over several tiles, keeps its part in
registers and writes it; the parts are summed in order. So there are no atomics, and results are bitwise
reproducible.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite_kernels.launch import Variant, architecture, operation

CHANNELS = 64
TOKENS = {False: 32, True: 16}  # of a tile, in backward or not: 8 or 16 values a thread
TILES = 16  # of a program in backward


@triton.jit
def _documents(
    starts, before, position, d_s, h_s, size,
    TAPS: tl.constexpr, DOCUMENTS: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Return the number of each position's document; the halo's positions are negative."""
    number = position.to(tl.int64) * 0
    if DOCUMENTS:
        own = tl.minimum(tl.maximum(position, 0), size - 1).to(tl.int64)
        number = tl.load(starts + own * d_s).to(tl.int64)
        if APART:
            past = tl.maximum(position + (TAPS - 1), 0).to(tl.int64)
            of_halo = tl.load(before + past * h_s, mask=position < 0, other=0).to(tl.int64)
            number = tl.where(position < 0, of_halo, number)
    return number


@triton.jit
def _values(
    x, halo, position, channel, visible, x_s, h_x, size,
    TAPS: tl.constexpr, WIDTH: tl.constexpr, HALO: tl.constexpr,
):  # fmt: skip
    """Load [tokens, channels] at positions as fp32, zero where not `visible`."""
    at = position.to(tl.int64)
    exists = visible & (position < size)
    source = x + at[:, None] * x_s + channel[None, :]
    if HALO:
        past = halo + (at + (TAPS - 1))[:, None] * h_x + channel[None, :]
        source = tl.where((position < 0)[:, None], past, source)
        exists &= position >= 1 - TAPS
    else:
        exists &= position >= 0
    return tl.load(source, mask=exists[:, None] & (channel < WIDTH)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _taps(weight, channel, tap, WIDTH: tl.constexpr):
    """Load one weight of each channel, [1, channels]."""
    return tl.load(weight + tap * WIDTH + channel, mask=channel < WIDTH, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _before_activation(
    x, halo, weight, bias, starts, before, position, channel, x_s, h_x, d_s, h_s, size,
    TAPS: tl.constexpr, WIDTH: tl.constexpr, HALO: tl.constexpr, DOCUMENTS: tl.constexpr, APART: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """Return the convolution [tokens, channels] at positions."""
    own = _documents(starts, before, position, d_s, h_s, size, TAPS, DOCUMENTS, APART)
    result = tl.zeros((position.shape[0], channel.shape[0]), tl.float32)
    for tap in tl.static_range(TAPS):
        at = position - (TAPS - 1 - tap)
        same = _documents(starts, before, at, d_s, h_s, size, TAPS, DOCUMENTS, APART) == own
        value = _values(x, halo, at, channel, same, x_s, h_x, size, TAPS, WIDTH, HALO)
        result += value * _taps(weight, channel, tap, WIDTH)
    if BIAS:
        result += _taps(bias, channel, 0, WIDTH)
    return result


@triton.jit(do_not_specialize=["size", "d_s", "d_b", "h_s", "h_b"])
def _forward(
    x, halo, weight, bias, starts, before, out, x_s, x_b, h_x, h_xb, d_s, d_b, h_s, h_b, size,
    TAPS: tl.constexpr, WIDTH: tl.constexpr, HALO: tl.constexpr, DOCUMENTS: tl.constexpr, APART: tl.constexpr,
    BIAS: tl.constexpr, SILU: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    row, batch = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    tile = tl.program_id(0) // tl.cdiv(WIDTH, CHANNELS)
    position = tile * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(0) % tl.cdiv(WIDTH, CHANNELS) * CHANNELS + tl.arange(0, CHANNELS)
    result = _before_activation(
        x + row * x_b, halo + row * h_xb, weight, bias, starts + row * d_b, before + row * h_b,
        position, channel, x_s, h_x, d_s, h_s, size, TAPS, WIDTH, HALO, DOCUMENTS, APART, BIAS,
    )  # fmt: skip
    if SILU:
        result *= tl.sigmoid(result)
    to = out + (position.to(tl.int64) * batch + row)[:, None] * WIDTH + channel[None, :]
    tl.store(
        to, result.to(out.dtype.element_ty), mask=(position < size)[:, None] & (channel < WIDTH)[None, :]
    )


@triton.jit
def _store_sums(
    to, sum0, sum1, sum2, sum3, sum_bias, exists, TAPS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    tl.store(to + (TAPS - 1) * WIDTH, tl.sum(sum0, 0), mask=exists)
    if TAPS > 1:
        tl.store(to + (TAPS - 2) * WIDTH, tl.sum(sum1, 0), mask=exists)
    if TAPS > 2:
        tl.store(to + (TAPS - 3) * WIDTH, tl.sum(sum2, 0), mask=exists)
    if TAPS > 3:
        tl.store(to, tl.sum(sum3, 0), mask=exists)
    tl.store(to + TAPS * WIDTH, tl.sum(sum_bias, 0), mask=exists)


@triton.jit(do_not_specialize=["size", "d_s", "d_b", "h_s", "h_b"])
def _backward(
    dout, x, halo, weight, bias, starts, before, dx, dhalo, dweight,
    x_s, x_b, h_x, h_xb, d_s, d_b, h_s, h_b, size,
    TAPS: tl.constexpr, WIDTH: tl.constexpr, HALO: tl.constexpr, DOCUMENTS: tl.constexpr, APART: tl.constexpr,
    BIAS: tl.constexpr, SILU: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    row, batch = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    across = tl.cdiv(WIDTH, CHANNELS)
    part = tl.program_id(0) // across
    channel = tl.program_id(0) % across * CHANNELS + tl.arange(0, CHANNELS)
    x, halo, starts, before = x + row * x_b, halo + row * h_xb, starts + row * d_b, before + row * h_b
    inside = (channel < WIDTH)[None, :]
    # of the weights, the last one first, and of the bias
    sum0 = tl.zeros((TOKENS, CHANNELS), tl.float32)
    sum1, sum2, sum3, sum_bias = sum0, sum0, sum0, sum0
    for tile in range(tl.minimum(TILES, tl.cdiv(size + (TAPS - 1), TOKENS) - part * TILES)):
        # the first K − 1 positions are the halo's
        position = (part * TILES + tile) * TOKENS + tl.arange(0, TOKENS) - (TAPS - 1)
        own = _documents(starts, before, position, d_s, h_s, size, TAPS, DOCUMENTS, APART)
        gradient = tl.zeros((TOKENS, CHANNELS), tl.float32)
        for later in tl.static_range(TAPS):
            reader = position + later
            exists = (reader >= 0) & (reader < size)
            at = (reader.to(tl.int64) * batch + row)[:, None] * WIDTH + channel[None, :]
            grad = tl.load(dout + at, mask=exists[:, None] & inside, other=0.0).to(tl.float32)
            if SILU:
                value = _before_activation(
                    x, halo, weight, bias, starts, before, reader, channel, x_s, h_x, d_s, h_s, size,
                    TAPS, WIDTH, HALO, DOCUMENTS, APART, BIAS,
                )  # fmt: skip
                sigmoid = tl.sigmoid(value)
                grad *= sigmoid * (1.0 + value * (1.0 - sigmoid))
            same = _documents(starts, before, reader, d_s, h_s, size, TAPS, DOCUMENTS, APART) == own
            visible = same[:, None] & exists[:, None]
            gradient += tl.where(visible, grad * _taps(weight, channel, TAPS - 1 - later, WIDTH), 0.0)
            if later == 0:
                sum_bias += grad
                for tap in tl.static_range(TAPS):  # before this token
                    past = position - tap
                    same = _documents(starts, before, past, d_s, h_s, size, TAPS, DOCUMENTS, APART) == own
                    product = grad * _values(x, halo, past, channel, same, x_s, h_x, size, TAPS, WIDTH, HALO)
                    if tap == 0:
                        sum0 += product
                    elif tap == 1:
                        sum1 += product
                    elif tap == 2:
                        sum2 += product
                    else:
                        sum3 += product
        at = position.to(tl.int64)
        result = gradient.to(dx.dtype.element_ty)
        to = dx + (at * batch + row)[:, None] * WIDTH + channel[None, :]
        tl.store(to, result, mask=((position >= 0) & (position < size))[:, None] & inside)
        if part + tile == 0:
            to = dhalo + ((at + (TAPS - 1)) * batch + row)[:, None] * WIDTH + channel[None, :]
            tl.store(to, result, mask=(position < 0)[:, None] & inside)
    to = dweight + ((part * batch + row) * (TAPS + 1)) * WIDTH + channel  # [parts, batch, K + 1, channels]
    _store_sums(to, sum0, sum1, sum2, sum3, sum_bias, channel < WIDTH, TAPS, WIDTH)


@functools.cache
def _variant(
    backward: bool,
    target: str,
    taps: int,
    width: int,
    halo: bool,
    documents: bool,
    apart: bool,
    bias: bool,
    silu: bool,
) -> Variant:
    constants = {"TAPS": taps, "WIDTH": width, "HALO": halo, "DOCUMENTS": documents, "APART": apart}
    constants |= {"BIAS": bias, "SILU": silu, "TOKENS": TOKENS[backward], "CHANNELS": CHANNELS}
    if backward:
        return Variant(_backward, {**constants, "TILES": TILES}, warps=2 if target == "gfx942" else 4)
    return Variant(_forward, constants, warps=4)


def _arguments(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    starts: Tensor | None,
    halo: Tensor | None,
    before: Tensor | None,
) -> tuple[list[Tensor], list[int]]:
    """Return the inputs of a kernel besides the gradient, and their strides."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    past = x if halo is None else halo.contiguous()
    numbers = x if starts is None else starts
    numbers_before = numbers if before is None else before
    by_row = [table.stride(1) if table.shape[1] > 1 else 0 for table in (numbers, numbers_before)]
    tensors = [x, past, weight.t().contiguous(), weight if bias is None else bias, numbers, numbers_before]
    strides = [x.stride(0), x.stride(1), past.stride(0), past.stride(1)]
    return tensors, [*strides, numbers.stride(0), by_row[0], numbers_before.stride(0), by_row[1], len(x)]


def _chosen(
    backward: bool,
    weight: Tensor,
    bias: Tensor | None,
    starts: Tensor | None,
    halo: Tensor | None,
    before: Tensor | None,
    silu: bool,
) -> Variant:
    channels, taps = weight.shape
    documents, apart = starts is not None, starts is not None and before is not None
    target = architecture(weight.device)
    return _variant(
        backward, target, taps, channels, halo is not None, documents, apart, bias is not None, silu
    )


def _like(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    starts: Tensor | None,
    halo: Tensor | None,
    before: Tensor | None,
    silu: bool,
) -> Tensor:
    return x.new_empty(x.shape)


@operation(fake=_like)
def causal_conv_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    starts: Tensor | None,
    halo: Tensor | None,
    before: Tensor | None,
    silu: bool,
) -> Tensor:
    """Return the outputs [seq, batch, channels].

    `halo` and `before` are the fields of `causal_conv.Halo`.
    """
    out = x.new_empty(x.shape)
    if out.numel() > 0:
        tensors, numbers = _arguments(x, weight, bias, starts, halo, before)
        variant = _chosen(False, weight, bias, starts, halo, before, silu)
        programs = triton.cdiv(len(x), TOKENS[False]) * triton.cdiv(x.shape[2], CHANNELS)
        variant.launch((programs, x.shape[1]), *tensors, out, *numbers)
    return out


def _like_gradients(
    dout: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    starts: Tensor | None,
    halo: Tensor | None,
    before: Tensor | None,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    channels, taps = weight.shape
    dweight = weight.new_empty(weight.shape, dtype=torch.float32)
    return x.new_empty(x.shape), dweight, dweight.new_empty(channels), x.new_empty(taps - 1, *x.shape[1:])


@operation(fake=_like_gradients)
def causal_conv_backward(
    dout: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    starts: Tensor | None,
    halo: Tensor | None,
    before: Tensor | None,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, of weight and bias in fp32, and of the halo."""
    dx, _, _, dhalo = _like_gradients(dout, x, weight, bias, starts, halo, before, silu)
    channels, taps = weight.shape
    parts = triton.cdiv(len(x) + taps - 1, TOKENS[True] * TILES)
    dweight = weight.new_empty((parts, x.shape[1], taps + 1, channels), dtype=torch.float32)
    if x.numel() > 0:
        tensors, numbers = _arguments(x, weight, bias, starts, halo, before)
        variant = _chosen(True, weight, bias, starts, halo, before, silu)
        programs = parts * triton.cdiv(channels, CHANNELS)
        variant.launch((programs, x.shape[1]), dout.contiguous(), *tensors, dx, dhalo, dweight, *numbers)
    total = dweight.sum((0, 1))
    return dx, total[:taps].t().contiguous(), total[taps].clone(), dhalo
