"""Cross-entropy of one rank's columns in two passes over its logits.

The kernels compute `cross_entropy.statistics` and `cross_entropy.gradient_`.

A logit is read once in forward, and read and overwritten once in backward: 6 bytes in bf16. Forward has one
program per row. It loops over tiles of DEPTH × COLUMNS logits and keeps, for each of the COLUMNS lanes, the
largest logit m so far and s = Σ exp(x − m), updated by each tile (Milakov and Gimelshein 2018, "Online
normalizer calculation for softmax"):

    m' = max(m, the lane's part of the tile)        s' = s · exp(m − m') + Σ exp(x − m')

A lane is in one thread, so threads communicate only at the end of the row: M = max(m), S = Σ s · exp(m − M).
In backward a program has a tile of one row; exp(x − lse) subtracts lse in two parts, which costs nothing and
keeps the last digits of fp32. Row numbers are 64-bit. The content of padded columns and ignored rows is never
used. The upstream gradient is read on the device: no host synchronization.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite_kernels.launch import Variant, architecture, operation

LANE_BYTES = 2048  # COLUMNS logits of a row: 128 bits for each of 128 threads
DEPTH = 4  # a tile has DEPTH × COLUMNS logits
ALIGN = 8  # logits: a rank's part of the vocabulary is padded to a multiple of it; 128 bits in bf16
# not larger than any logit; unlike −inf it can be subtracted from itself
LOWEST = tl.constexpr(-3.4028234663852886e38)
INTEGERS = ("tokens", "stride", "width", "valid", "vocab_start", "ignore_index")


@triton.jit
def _update(x, addend, largest, total, logits_sum, WITH_SUM: tl.constexpr):
    """Return the lanes' state after a tile of logits.

    Where a column does not exist, x is −inf and addend 0.
    """
    larger = tl.maximum(largest, tl.max(x, 0))
    total = total * tl.exp(largest - larger) + tl.sum(tl.exp(x - larger[None, :]), 0)
    if WITH_SUM:
        logits_sum += tl.sum(addend, 0)
    return larger, total, logits_sum


@triton.jit(do_not_specialize=INTEGERS)
def _statistics(
    logits, targets, stats, tokens, stride, width, valid, vocab_start, ignore_index,
    WITH_SUM: tl.constexpr, ALIGN: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * (stride * ALIGN)
    within = tl.arange(0, DEPTH)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    largest = tl.full((COLUMNS,), LOWEST, tl.float32)
    total = tl.zeros((COLUMNS,), tl.float32)
    logits_sum = tl.zeros((COLUMNS,), tl.float32)
    whole = valid // (DEPTH * COLUMNS) * (DEPTH * COLUMNS)
    for start in range(0, whole, DEPTH * COLUMNS):
        x = tl.load(line + start + within).to(tl.float32)
        largest, total, logits_sum = _update(x, x, largest, total, logits_sum, WITH_SUM)
    column = whole + within
    x = tl.load(line + column, mask=column < width * ALIGN, other=0.0).to(tl.float32)
    addend = tl.where(column < valid, x, 0.0)
    x = tl.where(column < valid, x, float("-inf"))
    largest, total, logits_sum = _update(x, addend, largest, total, logits_sum, WITH_SUM)
    most = tl.max(largest, 0)
    target = tl.load(targets + row)
    at = target - vocab_start
    inside = (at >= 0) & (at < valid) & (target != ignore_index)
    own = tl.load(line + at, mask=inside, other=0.0).to(tl.float32)
    scaled = tl.sum(total * tl.exp(largest - most), 0)
    line = tl.arange(0, 4)  # of the statistics
    value = tl.where(line == 2, own, tl.sum(logits_sum, 0))
    value = tl.where(line == 0, most, tl.where(line == 1, scaled, value))
    tl.store(stats + line * tl.cast(tokens, tl.int64) + row, value, mask=line < (4 if WITH_SUM else 3))


@triton.jit(do_not_specialize=INTEGERS)
def _gradient(
    logits, targets, lse, grad_scale, tokens, stride, width, valid, vocab_start, ignore_index,
    twice_z, at_target, everywhere,
    PER_TOKEN: tl.constexpr, ALIGN: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(width * ALIGN, COLUMNS)
    row = (tl.program_id(0) // across).to(tl.int64)
    column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    at = logits + row * (stride * ALIGN) + column
    target = tl.load(targets + row)
    counts = target != ignore_index
    row_lse, rest = tl.load(lse + row), tl.load(lse + tokens + row)
    scale = tl.load(grad_scale + row) if PER_TOKEN else tl.load(grad_scale)
    factor = scale * (1.0 + tl.cast(twice_z, tl.float32) * row_lse)
    x = tl.load(at, mask=(column < width * ALIGN) & counts, other=0.0).to(tl.float32)
    own = tl.where(column == (target - vocab_start).to(tl.int32), tl.cast(at_target, tl.float32), 0.0)
    gradient = factor * tl.exp((x - row_lse) - rest) - scale * (own + tl.cast(everywhere, tl.float32))
    gradient = tl.where((column < valid) & counts, gradient, 0.0)
    tl.store(at, gradient.to(logits.dtype.element_ty), mask=column < width * ALIGN)


@functools.cache
def _variant(chip: str, backward: bool, dtype: torch.dtype, option: bool, align: int) -> Variant:
    """Return a kernel; `option` is WITH_SUM of the forward and PER_TOKEN of the backward."""
    warps = 2 if chip == "gfx942" else 4  # a warp is 64 threads there
    columns = LANE_BYTES // dtype.itemsize
    if backward:
        constants = {"PER_TOKEN": option, "ALIGN": align, "COLUMNS": DEPTH * columns}
        return Variant(_gradient, constants, warps)
    constants = {"WITH_SUM": option, "ALIGN": align, "DEPTH": DEPTH, "COLUMNS": columns}
    return Variant(_statistics, constants, warps)


def _rows(logits: Tensor) -> tuple[Tensor, int]:
    """Return the logits, copied if their rows are not dense, and the unit of row lengths and strides."""
    dense = logits if logits.stride(1) == 1 and logits.stride(0) >= logits.shape[1] else logits.contiguous()
    return dense, 1 if dense.stride(0) % ALIGN or dense.shape[1] % ALIGN else ALIGN


def _empty_statistics(
    logits: Tensor, targets: Tensor, vocab_start: int, valid: int, ignore_index: int, with_sum: bool
) -> Tensor:
    return logits.new_empty((4 if with_sum else 3, logits.shape[0]), dtype=torch.float32)


@operation(fake=_empty_statistics)
def cross_entropy_statistics(
    logits: Tensor, targets: Tensor, vocab_start: int, valid: int, ignore_index: int, with_sum: bool
) -> Tensor:
    """Return [3 or 4, T] in fp32: see `cross_entropy.statistics`."""
    stats = _empty_statistics(logits, targets, vocab_start, valid, ignore_index, with_sum)
    (tokens, width), (dense, align) = logits.shape, _rows(logits)
    if tokens:
        sizes = (tokens, dense.stride(0) // align, width // align, valid, vocab_start, ignore_index)
        variant = _variant(architecture(logits.device), False, logits.dtype, with_sum, align)
        variant.launch((tokens,), dense, targets.contiguous(), stats, *sizes)
    return stats


@operation(mutates=("logits",))
def cross_entropy_gradient_(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    grad_scale: Tensor,
    vocab_start: int,
    valid: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    vocab_size: int,
) -> None:
    """Overwrite the logits with their gradient: see `cross_entropy.gradient_`.

    grad_scale is [] or [T] fp32, on the logits' device.
    """
    (tokens, width), (dense, align) = logits.shape, _rows(logits)
    if not logits.numel():
        return
    variant = _variant(architecture(logits.device), True, logits.dtype, grad_scale.dim() > 0, align)
    sizes = (tokens, dense.stride(0) // align, width // align, valid, vocab_start, ignore_index)
    terms = (2.0 * z_loss, 1.0 - label_smoothing, label_smoothing / vocab_size)
    tensors = (dense, targets.contiguous(), lse.contiguous(), grad_scale.contiguous())
    programs = tokens * triton.cdiv(width, variant.constants["COLUMNS"])
    variant.launch((programs,), *tensors, *sizes, *terms)
    if dense is logits:
        # autograd did not see the write: a second backward must fail, not read gradients
        torch.autograd.graph.increment_version(logits)
    else:
        logits.copy_(dense)
