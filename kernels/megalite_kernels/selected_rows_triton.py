"""Sums over the queries that select a row: `selected_rows.add`.

A query's part of the sum for each row that it selects is a matmul over the heads that read the row
(`_products`), written to memory for a block of queries. Then each row's parts are added in the order of the
queries (`_sum`), found in a table of the slots in which queries select the row. So there are no atomics, and
results are bitwise reproducible. A part is written and read once, in fp32.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite_kernels.launch import Variant, architecture

_PARTS = 1 << 26  # numbers in the parts of a block of queries: 256 MB
_QUERIES = 16  # whose parts are loaded at once


@triton.jit
def _selected(selection, at, top, SLOTS: tl.constexpr):
    """Return the rows [slots] in a query's slots from `at` on, and which exist."""
    slot = at + tl.arange(0, SLOTS)
    row = tl.load(selection + slot, mask=slot < top, other=-1)
    return row, row >= 0


@triton.jit
def _load(base, row, exists, stride, FIRST: tl.constexpr, LIMIT: tl.constexpr, WIDTH: tl.constexpr):
    """Load WIDTH channels from FIRST on of some rows; zero where a row does not exist."""
    column = FIRST + tl.arange(0, WIDTH)
    at = base + row.to(tl.int64)[:, None] * stride + column[None, :]
    if FIRST + WIDTH <= LIMIT:
        value = tl.load(at, mask=exists[:, None], other=0.0)
    else:
        value = tl.load(at, mask=exists[:, None] & (column < LIMIT)[None, :], other=0.0)
    return value


@triton.jit
def _store_transposed(
    base, row, exists, stride, value, FIRST: tl.constexpr, LIMIT: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Store [channels, rows]."""
    column = FIRST + tl.arange(0, WIDTH)
    at = base + row.to(tl.int64)[:, None] * stride + column[None, :]
    mask = exists[:, None] & (column < LIMIT)[None, :]
    tl.store(at, tl.trans(value).to(base.dtype.element_ty), mask=mask)


@triton.jit
def _product(
    sums, factors, x, head, slot, column, GROUP: tl.constexpr, top, x_h,
    LIMIT: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Add Σ factors · x over the heads of a group to [slots, columns]."""
    for at in range(0, GROUP, HEADS):
        own = head + at
        exists = own < GROUP
        factor = tl.load(
            factors + own.to(tl.int64)[:, None] * top + slot[None, :],
            mask=exists[:, None] & (slot < top)[None, :], other=0.0,
        )  # fmt: skip
        value = tl.load(
            x + own.to(tl.int64)[:, None] * x_h + column[None, :],
            mask=exists[:, None] & (column < LIMIT)[None, :], other=0.0,
        )  # fmt: skip
        sums = tl.dot(tl.trans(factor), value, sums)
    return sums


@triton.jit
def _products(
    factors, x, more, y, parts, x_s, x_b, x_h, y_s, y_b, y_h, top,
    MORE: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    MORE_WIDTH: tl.constexpr, HEADS: tl.constexpr, SLOTS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    across: tl.constexpr = (WIDTH + CHANNELS - 1) // CHANNELS
    query, row = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64) // GROUPS
    group, batch = tl.program_id(2).to(tl.int64) % GROUPS, tl.num_programs(2) // GROUPS
    slot = tl.program_id(0) // across * SLOTS + tl.arange(0, SLOTS)
    first = tl.program_id(0) % across * CHANNELS
    head, column = tl.arange(0, HEADS), first + tl.arange(0, CHANNELS)
    own = (query * batch + row) * GROUPS + group
    x += query * x_s + row * x_b + group * (GROUP * x_h)
    sums = tl.zeros((SLOTS, CHANNELS), tl.float32)
    sums = _product(sums, factors + own * GROUP * top, x, head, slot, column, GROUP, top, x_h, WIDTH, HEADS)
    if MORE and first < MORE_WIDTH:
        y += query * y_s + row * y_b + group * (GROUP * y_h)
        sums = _product(
            sums, more + own * GROUP * top, y, head, slot, column, GROUP, top, y_h, MORE_WIDTH, HEADS
        )  # fmt: skip
    to = parts + (own * top + slot)[:, None] * WIDTH + column[None, :]
    tl.store(to, sums, mask=(slot < top)[:, None] & (column < WIDTH)[None, :])


@triton.jit(do_not_specialize=["rows", "size"])
def _sum(
    parts, slots, total, rows, size, top,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    across: tl.constexpr = (WIDTH + CHANNELS - 1) // CHANNELS
    own = tl.program_id(0).to(tl.int64) // across
    column = tl.program_id(0) % across * CHANNELS + tl.arange(0, CHANNELS)
    row, group = tl.program_id(1).to(tl.int64) // GROUPS, tl.program_id(1).to(tl.int64) % GROUPS
    batch = tl.num_programs(1) // GROUPS
    slots += (row * (rows + 1) + own) * size
    to = total + ((own * batch + row) * GROUPS + group) * WIDTH + column
    sums = tl.load(to, mask=column < WIDTH, other=0.0)
    for first in range(0, size, QUERIES):
        query = first + tl.arange(0, QUERIES)
        slot = tl.load(slots + query, mask=query < size, other=-1)
        at = (((query.to(tl.int64) * batch + row) * GROUPS + group) * top + slot) * WIDTH
        mask = (slot >= 0)[:, None] & (column < WIDTH)[None, :]
        value = tl.load(parts + at[:, None] + column[None, :], mask=mask, other=0.0)
        sums += tl.sum(value, 0)
    tl.store(to, sums, mask=column < WIDTH)


class ProductTile(NamedTuple):
    """How a kernel is compiled."""

    heads: int
    slots: int
    channels: int
    warps: int
    stages: int


TILES = {
    "_products": {"": ProductTile(64, 64, 128, 4, 2)},
    "_sum": {"": ProductTile(0, 0, 128, 4, 1)},
}
"""Kernel → its tiles, by architecture; the one of "" is that of the others."""


@functools.cache
def _variant(kernel: str, target: str, options: tuple[tuple[str, Any], ...]) -> Variant:
    tiles, constants = TILES[kernel], dict(options)
    tile = tiles.get(target, tiles[""])
    constants["CHANNELS"] = min(tile.channels, padded(constants["WIDTH"]))
    if kernel == "_sum":
        constants["QUERIES"] = _QUERIES
    else:
        constants |= {"HEADS": min(tile.heads, padded(constants["GROUP"])), "SLOTS": tile.slots}
    return Variant(globals()[kernel], constants, tile.warps, tile.stages)


def padded(width: int) -> int:
    return max(16, triton.next_power_of_2(width))


def queries_of(batch: int, groups: int, top: int, width: int) -> int:
    """Return the number of queries whose parts are in memory at once."""
    return max(1, _PARTS // max(1, batch * groups * top * width))


def add(
    total: Tensor, factors: Tensor, x: Tensor, selection: Tensor,
    more: Tensor | None = None, y: Tensor | None = None,
) -> None:  # fmt: skip
    """`selected_rows.add` for a block of queries; total and factors are contiguous.

    Args:
        more, y: other factors and values, of which the product is added to the first channels.
    """
    rows, batch, groups, width = total.shape
    size, top, heads = len(x), selection.shape[2], x.shape[2]
    if min(total.numel(), x.numel(), top) == 0:
        return
    parts = x.new_empty((size, batch, groups, top, width), dtype=torch.float32)
    place = selection.long().masked_fill(selection < 0, rows).permute(1, 2, 0)
    slots = torch.full((batch, rows + 1, size), -1, dtype=torch.int32, device=x.device)
    number = torch.arange(top, dtype=torch.int32, device=x.device)[:, None].expand(batch, top, size)
    slots.scatter_(1, place, number)
    if more is None or y is None:
        more, y, more_width = factors, x, 0
    else:
        more_width = y.shape[3]
    shape = {"GROUPS": groups, "WIDTH": width}
    options = {"MORE": more_width > 0, "GROUP": heads // groups, "MORE_WIDTH": more_width, **shape}
    target = architecture(x.device)
    variant = _variant("_products", target, tuple(options.items()))
    tiles = triton.cdiv(top, variant.constants["SLOTS"]) * triton.cdiv(width, variant.constants["CHANNELS"])
    steps = *x.stride()[:3], *y.stride()[:3]
    variant.launch((tiles, size, batch * groups), factors, x, more, y, parts, *steps, top)
    variant = _variant("_sum", target, tuple(shape.items()))
    grid = rows * triton.cdiv(width, variant.constants["CHANNELS"]), batch * groups
    variant.launch(grid, parts, slots, total, rows, size, top)
