"""The functions of `sparse_attention` without a score matrix: flash attention to gathered rows.

A program has some heads of one query that read the same rows, and goes over the query's selected rows. Heads
lie along the columns of its tiles, and rows and channels along their rows:

    s [rows, heads] = k qᵀ        out [channels, heads] = Σ vᵀ p

So tensor cores, which need 64 rows on Hopper and Blackwell, are full with 16 heads, too. Where values are
channels of the keys, a tile of both is loaded once. Heads of 576 channels are computed as 512 and 64.

Backward computes dq with p and ds (`_backward`), which it keeps for a block of queries: their products with
dout and q, summed over heads, are what a query adds to its rows (`selected_rows_triton`). So there are no
atomics, and results are bitwise reproducible. p and ds are rounded to the inputs' type before products.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite_kernels.launch import Variant, architecture, operation
from megalite_kernels.selected_rows_triton import (
    _load,
    _selected,
    _store_transposed,
    add,
    padded,
    queries_of,
)

_LOG2E = tl.constexpr(math.log2(math.e))
_LN2 = tl.constexpr(math.log(2))


@triton.jit
def _heads_of(block, GROUP: tl.constexpr, HEADS: tl.constexpr):
    """Return some heads of a group, and which exist."""
    head = block * HEADS + tl.arange(0, HEADS)
    return head, head < GROUP


@triton.jit
def _scores(k_tile, k_rest, q_tile, q_rest, REST: tl.constexpr):
    """Return k qᵀ, [slots, heads]."""
    scores = tl.dot(k_tile, tl.trans(q_tile))
    if REST:
        scores = tl.dot(k_rest, tl.trans(q_rest), scores)
    return scores


@triton.jit
def _rest(base, row, exists, stride, tile, DIM: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr):
    """Load the channels after the first WIDTH; what this is without any is not read."""
    return _load(base, row, exists, stride, WIDTH, DIM, REST) if REST else tile


@triton.jit
def _forward(
    q, keys, values, selection, out, lse, q_s, q_b, q_h, k_t, k_b, k_g, v_t, v_b, v_g, top,
    SCALE: tl.constexpr, SHARED: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    REST: tl.constexpr, VDIM: tl.constexpr, VWIDTH: tl.constexpr, HEADS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    query, block = tl.program_id(0).to(tl.int64) // blocks, tl.program_id(0) % blocks
    group, row = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    groups, batch = tl.num_programs(1), tl.num_programs(2)
    head, is_head = _heads_of(block, GROUP, HEADS)
    line, first = query * batch + row, group * GROUP
    q += query * q_s + row * q_b + first * q_h
    q_tile = _load(q, head, is_head, q_h, 0, DIM, WIDTH)
    q_rest = _rest(q, head, is_head, q_h, q_tile, DIM, WIDTH, REST)
    keys, values, selection = (
        keys + row * k_b + group * k_g,
        values + row * v_b + group * v_g,
        selection + line * top,
    )
    # finite, so that p = 2^-inf = 0 where no row has been seen yet, not NaN
    largest = tl.full([HEADS], -1e38, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    result = tl.zeros([VWIDTH, HEADS], tl.float32)
    for at in tl.range(0, top, SLOTS, disable_licm=True):
        key, exists = _selected(selection, at, top, SLOTS)
        k_tile = _load(keys, key, exists, k_t, 0, DIM, WIDTH)
        k_rest = _rest(keys, key, exists, k_t, k_tile, DIM, WIDTH, REST)
        x = _scores(k_tile, k_rest, q_tile, q_rest, REST) * (SCALE * _LOG2E)
        x = tl.where(exists[:, None], x, -float("inf"))
        larger = tl.maximum(largest, tl.max(x, 0))
        p = tl.exp2(x - larger[None, :])
        shrink = tl.exp2(largest - larger)
        total = total * shrink + tl.sum(p, 0)
        v_tile = k_tile if SHARED else _load(values, key, exists, v_t, 0, VDIM, VWIDTH)
        result = tl.dot(tl.trans(v_tile), p.to(v_tile.dtype), result * shrink[None, :])
        largest = larger
    sees = total > 0
    total = tl.where(sees, total, 1.0)
    own = line * (groups * GROUP) + first
    _store_transposed(out + own * VDIM, head, is_head, VDIM, result / total[None, :], 0, VDIM, VWIDTH)
    log_sum = tl.where(sees, (largest + tl.log2(total)) * _LN2, -float("inf"))
    tl.store(lse + own + head, log_sum, mask=is_head)


@triton.jit
def _backward(
    dout, q, keys, values, out, lse, selection, dq, kept_p, kept_ds,
    q_s, q_b, q_h, k_t, k_b, k_g, v_t, v_b, v_g, top,
    SCALE: tl.constexpr, SHARED: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    REST: tl.constexpr, VDIM: tl.constexpr, VWIDTH: tl.constexpr, HEADS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    query, block = tl.program_id(0).to(tl.int64) // blocks, tl.program_id(0) % blocks
    group, row = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    groups, batch = tl.num_programs(1), tl.num_programs(2)
    head, is_head = _heads_of(block, GROUP, HEADS)
    line, first = query * batch + row, group * GROUP
    own = line * (groups * GROUP) + first
    q += query * q_s + row * q_b + first * q_h
    q_tile = _load(q, head, is_head, q_h, 0, DIM, WIDTH)
    q_rest = _rest(q, head, is_head, q_h, q_tile, DIM, WIDTH, REST)
    grad = _load(dout + own * VDIM, head, is_head, VDIM, 0, VDIM, VWIDTH)
    result = _load(out + own * VDIM, head, is_head, VDIM, 0, VDIM, VWIDTH)
    inner = tl.sum(grad.to(tl.float32) * result.to(tl.float32), 1)
    shift = tl.load(lse + own + head, mask=is_head, other=0.0) * _LOG2E
    keys, values, selection = (
        keys + row * k_b + group * k_g,
        values + row * v_b + group * v_g,
        selection + line * top,
    )
    dq_tile = tl.zeros([WIDTH, HEADS], tl.float32)
    dq_rest = tl.zeros([REST if REST else 16, HEADS], tl.float32)
    for at in tl.range(0, top, SLOTS, disable_licm=True):
        key, exists = _selected(selection, at, top, SLOTS)
        k_tile = _load(keys, key, exists, k_t, 0, DIM, WIDTH)
        k_rest = _rest(keys, key, exists, k_t, k_tile, DIM, WIDTH, REST)
        v_tile = k_tile if SHARED else _load(values, key, exists, v_t, 0, VDIM, VWIDTH)
        x = _scores(k_tile, k_rest, q_tile, q_rest, REST) * (SCALE * _LOG2E)
        p = tl.exp2(tl.where(exists[:, None], x - shift[None, :], -float("inf")))
        dp = tl.dot(v_tile, tl.trans(grad))
        ds = (p * (dp - inner[None, :]) * SCALE).to(k_tile.dtype)
        slot = at + tl.arange(0, SLOTS)
        to = (own + head)[None, :] * top + slot[:, None]
        mask = is_head[None, :] & (slot < top)[:, None]
        tl.store(kept_p + to, p.to(k_tile.dtype), mask=mask)
        tl.store(kept_ds + to, ds, mask=mask)
        dq_tile = tl.dot(tl.trans(k_tile), ds, dq_tile)
        if REST:
            dq_rest = tl.dot(tl.trans(k_rest), ds, dq_rest)
    dq += own * DIM
    _store_transposed(dq, head, is_head, DIM, dq_tile, 0, DIM, WIDTH)
    if REST:
        _store_transposed(dq, head, is_head, DIM, dq_rest, WIDTH, DIM, REST)


@triton.jit
def _probabilities(
    q, keys, selection, lse, summed, q_s, q_b, q_h, k_t, k_b, k_g, top,
    SCALE: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    REST: tl.constexpr, HEADS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    at, row = tl.program_id(1) * SLOTS, tl.program_id(2).to(tl.int64)
    query, batch = tl.program_id(0).to(tl.int64), tl.num_programs(2)
    line = query * batch + row
    key, exists = _selected(selection + line * top, at, top, SLOTS)
    keys, q = keys + row * k_b, q + query * q_s + row * q_b
    sums = tl.zeros([SLOTS], tl.float32)
    for group in range(GROUPS):
        k_tile = _load(keys + tl.cast(group, tl.int64) * k_g, key, exists, k_t, 0, DIM, WIDTH)
        k_rest = _rest(keys + tl.cast(group, tl.int64) * k_g, key, exists, k_t, k_tile, DIM, WIDTH, REST)
        for block in tl.range(0, GROUP, HEADS, disable_licm=True):
            lane = block + tl.arange(0, HEADS)
            is_head, head = lane < GROUP, group * GROUP + lane
            q_tile = _load(q, head, is_head, q_h, 0, DIM, WIDTH)
            q_rest = _rest(q, head, is_head, q_h, q_tile, DIM, WIDTH, REST)
            shift = tl.load(lse + line * (GROUPS * GROUP) + head, mask=is_head, other=float("inf")) * _LOG2E
            x = _scores(k_tile, k_rest, q_tile, q_rest, REST) * (SCALE * _LOG2E)
            sums += tl.sum(tl.exp2(tl.where(exists[:, None], x - shift[None, :], -float("inf"))), 1)
    slot = at + tl.arange(0, SLOTS)
    tl.store(summed + line * top + slot, sums, mask=slot < top)


class SparseTile(NamedTuple):
    """How a kernel is compiled."""

    heads: int
    slots: int
    warps: int
    stages: int


TILES = {
    "_forward": {
        "": SparseTile(32, 64, 8, 1),
        "sm_90": SparseTile(64, 64, 8, 2),
        "gfx942": SparseTile(16, 32, 8, 1),
    },
    "_backward": {
        "": SparseTile(16, 64, 8, 1),
        "sm_80": SparseTile(16, 32, 8, 1),
        "sm_90": SparseTile(32, 64, 8, 2),
        "gfx942": SparseTile(16, 16, 4, 1),
    },
    "_probabilities": {
        "": SparseTile(64, 64, 8, 1),
        "sm_80": SparseTile(16, 32, 8, 1),
        "gfx942": SparseTile(16, 32, 8, 1),
    },
}
"""Kernel → its tiles, by architecture; the one of "" is that of the others."""


@functools.cache
def _variant(kernel: str, target: str, options: tuple[tuple[str, Any], ...]) -> Variant:
    """Return the kernel with its tile; options are its constants besides the sizes of the tile."""
    constants = dict(options)
    tiles, dim = TILES[kernel], constants["DIM"]
    tile = tiles.get(target, tiles[""])
    if constants.get("SHARED"):  # the values are in the first tile
        width = padded(constants["VDIM"])
    else:
        width = padded(dim) if dim & (dim - 1) == 0 else max(16, padded(dim) // 2)
    rest = padded(dim - width) if dim > width else 0
    constants |= {"WIDTH": width, "REST": rest, "HEADS": min(tile.heads, padded(constants["GROUP"]))}
    if "VDIM" in constants:
        constants["VWIDTH"] = width if constants["SHARED"] else padded(constants["VDIM"])
    return Variant(globals()[kernel], {**constants, "SLOTS": tile.slots}, tile.warps, tile.stages)


def _readable(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


class _Call:
    """The arguments of a call as the kernels read them."""

    def __init__(
        self, q: Tensor, keys: Tensor, values: Tensor | None, width: int, selection: Tensor, scale: float
    ):
        self.q, self.keys = _readable(q), _readable(keys)
        self.values = self.keys if values is None else _readable(values)
        self.selection, self.groups = selection.contiguous(), keys.shape[2]
        self.options: dict[str, Any] = {"SCALE": scale, "GROUP": q.shape[2] // self.groups, "DIM": q.shape[3]}
        self.of_values = {"SHARED": values is None, "VDIM": width}
        self.top = selection.shape[2]

    def strides(self, *tensors: Tensor) -> list[int]:
        return [step for x in tensors for step in x.stride()[:3]]

    def launch(self, kernel: str, *tensors: Tensor, part: slice = slice(None)) -> None:
        """Run a kernel for some queries; `tensors` are its own."""
        options = {**self.options, **self.of_values}
        variant = _variant(kernel, architecture(self.q.device), tuple(options.items()))
        blocks = triton.cdiv(options["GROUP"], variant.constants["HEADS"])
        q, selection = self.q[part], self.selection[part]
        grid = len(q) * blocks, self.groups, q.shape[1]
        steps = self.strides(q, self.keys, self.values)
        if kernel == "_forward":
            variant.launch(grid, q, self.keys, self.values, selection, *tensors, *steps, self.top)
        else:
            dout, out, lse, *others = tensors
            given = dout, q, self.keys, self.values, out, lse, selection
            variant.launch(grid, *given, *others, *steps, self.top)


def _like(
    q: Tensor, keys: Tensor, values: Tensor | None, width: int, selection: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:3], width)), q.new_empty(q.shape[:3], dtype=torch.float32)


@operation(fake=_like)
def sparse_attention_forward(
    q: Tensor, keys: Tensor, values: Tensor | None, width: int, selection: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the outputs and log-sum-exps; without values these are `width` channels of the keys."""
    out, lse = _like(q, keys, values, width, selection, scale)
    if out.numel():
        _Call(q, keys, values, width, selection, scale).launch("_forward", out, lse)
    return out, lse


def _like_gradients(
    dout: Tensor, q: Tensor, keys: Tensor, values: Tensor | None, out: Tensor, lse: Tensor,
    selection: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dkeys = keys.new_empty(keys.shape, dtype=torch.float32)
    dvalues = keys.new_empty(0, dtype=torch.float32) if values is None else dkeys.new_empty(values.shape)
    return q.new_empty(q.shape), dkeys, dvalues


@operation(fake=_like_gradients)
def sparse_attention_backward(
    dout: Tensor, q: Tensor, keys: Tensor, values: Tensor | None, out: Tensor, lse: Tensor,
    selection: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, and of keys and values in fp32; an empty one without values."""
    dq, dkeys, dvalues = _like_gradients(dout, q, keys, values, out, lse, selection, scale)
    dkeys.zero_(), dvalues.zero_()
    width, (size, batch, heads, dim) = out.shape[3], q.shape
    call = _Call(q, keys, values, width, selection, scale)
    dout, out, lse = dout.contiguous(), out.contiguous(), lse.contiguous()
    step = queries_of(batch, call.groups, call.top, max(dim, width))
    for first in range(0, size if q.numel() else 0, step):
        part = slice(first, min(first + step, size))
        own = call.q[part]
        p, ds = (own.new_empty(len(own), batch, heads, call.top) for _ in range(2))
        call.launch("_backward", dout[part], out[part], lse[part], dq[part], p, ds, part=part)
        if values is None:
            add(dkeys, ds, own, call.selection[part], p, dout[part])
        else:
            add(dkeys, ds, own, call.selection[part])
            add(dvalues, p, dout[part], call.selection[part])
    return dq, dkeys, dvalues


def _like_probabilities(q: Tensor, keys: Tensor, selection: Tensor, lse: Tensor, scale: float) -> Tensor:
    return q.new_empty(selection.shape, dtype=torch.float32)


@operation(fake=_like_probabilities)
def sparse_attention_probabilities(
    q: Tensor, keys: Tensor, selection: Tensor, lse: Tensor, scale: float
) -> Tensor:
    """Return the probabilities summed over the heads, [seq, batch, top]."""
    summed = _like_probabilities(q, keys, selection, lse, scale)
    if summed.numel():
        call = _Call(q, keys, None, 1, selection, scale)
        options = {**call.options, "GROUPS": call.groups}
        variant = _variant("_probabilities", architecture(q.device), tuple(options.items()))
        tiles = triton.cdiv(call.top, variant.constants["SLOTS"])
        tensors = call.q, call.keys, call.selection, lse.contiguous(), summed
        steps = call.strides(call.q, call.keys)
        variant.launch((len(q), tiles, q.shape[1]), *tensors, *steps, call.top)
    return summed
