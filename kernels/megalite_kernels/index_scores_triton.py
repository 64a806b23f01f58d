"""The functions of `index_scores` without the products of all heads in memory.

    _packed           score and position of every row for each query, in one integer
    _selected_scores  scores of the selected rows
    _gradients        dq and dw, and the gradients of the products, which are kept for a block of queries

`_packed` sums in fp64 by default: over the channels one after the other, then over the heads. Triton's
matmuls of fp64 do not compile for every architecture, so a GPU's tensor cores are not used. They are for sums
in fp32 (`exact` is False): also there the order of a sum does not depend on where in a tile a score is. torch
finds the largest integers of each query.

The products in the other two have rows along the rows of their tiles and heads along their columns, as in
`sparse_attention_triton`. Gradients of k: `selected_rows_triton`. So there are no atomics, and results are
bitwise reproducible.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import functools
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

_BLOCK = 1 << 25  # integers of a block of queries: 256 MB
_HIDDEN = tl.constexpr(-(1 << 63))  # below every packed score


@triton.jit
def _order(score):
    """Return integers in the order of the scores; −0.0 equals 0.0."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit(do_not_specialize=["p_s", "p_b", "r_t", "r_b", "d_s", "d_b"])
def _packed(
    q, k, w, positions, row_positions, starts, packed,
    q_s, q_b, q_h, k_t, k_b, w_s, w_b, p_s, p_b, r_t, r_b, d_s, d_b, rows,
    EXACT: tl.constexpr, ORDERED: tl.constexpr, DOCUMENTS: tl.constexpr, COUNT: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    query, row = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    batch = tl.num_programs(2)
    key, head = tl.program_id(0) * KEYS + tl.arange(0, KEYS), tl.arange(0, HEADS)
    exists, is_head = key < rows, head < COUNT
    at = key.to(tl.int64)
    if not ORDERED:
        at = tl.load(row_positions + at * r_t + row * r_b, mask=exists, other=0).to(tl.int64)
    position = tl.load(positions + query * p_s + row * p_b).to(tl.int64)
    visible = exists & (at <= position)
    if DOCUMENTS:
        visible &= at >= tl.load(starts + query * d_s + row * d_b).to(tl.int64)
    result = at * 0 + _HIDDEN
    if tl.max(visible.to(tl.int32)) > 0:
        q, k = q + query * q_s + row * q_b, k + row * k_b
        weight = tl.load(w + query * w_s + row * w_b + head, mask=is_head, other=0.0)
        if EXACT:
            # k [channels, rows] and q [channels, heads] lie so that a channel's are adjacent
            products = tl.zeros((KEYS, HEADS), tl.float64)
            for channel in range(DIM):
                keys = tl.load(
                    k + tl.cast(channel, tl.int64) * k_t + key[:, None], mask=exists[:, None], other=0.0
                )
                queries = tl.load(
                    q + tl.cast(channel, tl.int64) * q_h + head[None, :], mask=is_head[None, :], other=0.0
                )
                products += keys.to(tl.float64) * queries.to(tl.float64)
            weight = weight.to(tl.float64)
        else:
            keys = _load(k, key, exists, k_t, 0, DIM, WIDTH)
            queries = _load(q, head, is_head, q_h, 0, DIM, WIDTH)
            products = tl.dot(keys, tl.trans(queries))
        score = tl.sum(tl.where(products > 0, products, 0.0) * weight[None, :], 1).to(tl.float32)
        values = (_order(score).to(tl.int64) << 32) + (0xFFFFFFFF - at)
        result = tl.where(visible, values, result)
    tl.store(packed + (query * batch + row) * rows + key, result, mask=exists)


@triton.jit
def _selected_scores(
    q, k, w, selection, scores, q_s, q_b, q_h, k_t, k_b, w_s, w_b, top,
    COUNT: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    first, row = tl.program_id(1) * KEYS, tl.program_id(2).to(tl.int64)
    query, batch = tl.program_id(0).to(tl.int64), tl.num_programs(2)
    line, head = query * batch + row, tl.arange(0, HEADS)
    key, exists = _selected(selection + line * top, first, top, KEYS)
    keys = _load(k + row * k_b, key, exists, k_t, 0, DIM, WIDTH)
    queries = _load(q + query * q_s + row * q_b, head, head < COUNT, q_h, 0, DIM, WIDTH)
    weight = tl.load(w + query * w_s + row * w_b + head, mask=head < COUNT, other=0.0).to(tl.float32)
    products = tl.dot(keys, tl.trans(queries))
    score = tl.sum(tl.maximum(products, 0.0) * weight[None, :], 1)
    slot = first + tl.arange(0, KEYS)
    tl.store(scores + line * top + slot, tl.where(exists, score, -float("inf")), mask=slot < top)


@triton.jit
def _gradients(
    dscores, q, k, w, selection, dq, dw, kept, q_s, q_b, q_h, k_t, k_b, w_s, w_b, top,
    COUNT: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    query, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    line, head = query * tl.num_programs(1) + row, tl.arange(0, HEADS)
    is_head, k = head < COUNT, k + row * k_b
    queries = _load(q + query * q_s + row * q_b, head, is_head, q_h, 0, DIM, WIDTH)
    weight = tl.load(w + query * w_s + row * w_b + head, mask=is_head, other=0.0).to(tl.float32)
    dq_tile = tl.zeros([WIDTH, HEADS], tl.float32)
    dw_tile = tl.zeros([HEADS], tl.float32)
    for at in tl.range(0, top, KEYS, disable_licm=True):
        key, exists = _selected(selection + line * top, at, top, KEYS)
        keys = _load(k, key, exists, k_t, 0, DIM, WIDTH)
        slot = at + tl.arange(0, KEYS)
        grad = tl.load(dscores + line * top + slot, mask=exists, other=0.0)
        products = tl.dot(keys, tl.trans(queries))
        dw_tile += tl.sum(tl.maximum(products, 0.0) * grad[:, None], 0)
        dproducts = tl.where(products > 0, grad[:, None] * weight[None, :], 0.0).to(keys.dtype)
        to = (line * COUNT + head)[None, :] * top + slot[:, None]
        tl.store(kept + to, dproducts, mask=is_head[None, :] & (slot < top)[:, None])
        dq_tile = tl.dot(tl.trans(keys), dproducts, dq_tile)
    _store_transposed(dq + line * (COUNT * DIM), head, is_head, DIM, dq_tile, 0, DIM, WIDTH)
    tl.store(dw + line * COUNT + head, dw_tile, mask=is_head)


class ScoreTile(NamedTuple):
    """How a kernel is compiled."""

    keys: int
    warps: int
    stages: int


TILES = {
    "_packed": {"": ScoreTile(128, 4, 1)},
    "_packed exact": {"": ScoreTile(64, 4, 1)},
    "_selected_scores": {"": ScoreTile(128, 4, 1)},
    "_gradients": {"": ScoreTile(64, 4, 2)},
}
"""Kernel → its tiles, by architecture; the one of "" is that of the others."""


@functools.cache
def _variant(kernel: str, target: str, options: tuple[tuple[str, Any], ...]) -> Variant:
    constants = dict(options)
    tiles = TILES["_packed exact" if constants.get("EXACT") else kernel]
    tile = tiles.get(target, tiles[""])
    constants |= {"WIDTH": padded(constants["DIM"]), "HEADS": padded(constants["COUNT"]), "KEYS": tile.keys}
    return Variant(globals()[kernel], constants, tile.warps, tile.stages)


def _chosen(kernel: str, q: Tensor, **options: bool) -> Variant:
    constants = {**options, "COUNT": q.shape[2], "DIM": q.shape[3]}
    return _variant(kernel, architecture(q.device), tuple(constants.items()))


def _readable(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _by_row(x: Tensor | None, like: Tensor) -> tuple[Tensor, list[int]]:
    """Return a table […, batch or 1], and its strides.

    Args:
        like: passed in place of none.
    """
    if x is None:
        return like, [0, 0]
    return x, [x.stride(0), x.stride(1) if x.shape[1] > 1 else 0]


def packed(
    q: Tensor, k: Tensor, w: Tensor, positions: Tensor, key_positions: Tensor | None,
    document_start: Tensor | None, exact: bool,
) -> Tensor:  # fmt: skip
    """Return score and position of every row for each query, [seq, batch, rows].

    Args:
        q, k: as `arranged` returns them.
    """
    seq, batch, heads = w.shape
    rows = k.shape[2] if exact else len(k)
    result = torch.empty(seq, batch, rows, dtype=torch.int64, device=q.device)
    tables = [_by_row(x, positions) for x in (positions, key_positions, document_start)]
    options = {"EXACT": exact, "ORDERED": key_positions is None, "DOCUMENTS": document_start is not None}
    like = q.transpose(2, 3) if exact else q
    variant = _chosen("_packed", like, **options)
    steps = *q.stride()[:3], *(k.stride()[1::-1] if exact else k.stride()[:2]), *w.stride()[:2]
    of_tables = [step for _, strides in tables for step in strides]
    grid = triton.cdiv(rows, variant.constants["KEYS"]), seq, batch
    variant.launch(grid, q, k, w, *(x for x, _ in tables), result, *steps, *of_tables, rows)
    return result


def _like_selection(
    q: Tensor, k: Tensor, w: Tensor, top: int, positions: Tensor, key_positions: Tensor | None,
    document_start: Tensor | None, exact: bool,
) -> Tensor:  # fmt: skip
    return torch.empty(*w.shape[:2], top, dtype=torch.int32, device=q.device)


@operation(fake=_like_selection)
def index_scores_select(
    q: Tensor, k: Tensor, w: Tensor, top: int, positions: Tensor, key_positions: Tensor | None,
    document_start: Tensor | None, exact: bool,
) -> Tensor:  # fmt: skip
    """Return the selection of each query; arguments as in `index_scores.select`."""
    seq, batch, _ = w.shape
    selection = _like_selection(q, k, w, top, positions, key_positions, document_start, exact).fill_(-1)
    rows = len(k)
    if min(selection.numel(), rows, q.numel()) == 0:
        return selection
    q, k, w, count = _readable(q), _readable(k), _readable(w), min(top, rows)
    if exact:  # a channel's numbers lie next to each other
        k = k.permute(1, 2, 0).contiguous()
    step = max(1, _BLOCK // (batch * rows))
    for first in range(0, seq, step):
        part = slice(first, first + step)
        own = q[part].transpose(2, 3).contiguous() if exact else q[part]
        starts = None if document_start is None else document_start[part]
        values, at = packed(own, k, w[part], positions[part], key_positions, starts, exact).topk(count)
        at = at.masked_fill_(values == _HIDDEN.value, rows).sort(-1).values
        selection[part, :, :count] = at.masked_fill_(at == rows, -1)
    return selection


def _like_scores(q: Tensor, k: Tensor, w: Tensor, selection: Tensor) -> Tensor:
    return q.new_empty(selection.shape, dtype=torch.float32)


@operation(fake=_like_scores)
def index_scores_selected(q: Tensor, k: Tensor, w: Tensor, selection: Tensor) -> Tensor:
    """Return the scores of the selected rows, [seq, batch, top]."""
    scores = _like_scores(q, k, w, selection)
    if scores.numel():
        q, k, w, selection, top = (
            _readable(q),
            _readable(k),
            _readable(w),
            selection.contiguous(),
            scores.shape[2],
        )
        variant = _chosen("_selected_scores", q)
        steps = *q.stride()[:3], *k.stride()[:2], *w.stride()[:2]
        grid = len(w), triton.cdiv(top, variant.constants["KEYS"]), w.shape[1]
        variant.launch(grid, q, k, w, selection, scores, *steps, top)
    return scores


def _like_gradients(
    dscores: Tensor, q: Tensor, k: Tensor, w: Tensor, selection: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    wide = [x.new_empty(x.shape, dtype=torch.float32) for x in (k, w)]
    return q.new_empty(q.shape), wide[0], wide[1]


@operation(fake=_like_gradients)
def index_scores_selected_backward(
    dscores: Tensor, q: Tensor, k: Tensor, w: Tensor, selection: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, and of k and w in fp32."""
    dq, dk, dw = _like_gradients(dscores, q, k, w, selection)
    dk.zero_()
    (seq, batch, heads), top = w.shape, selection.shape[2]
    q, k, w = _readable(q), _readable(k), _readable(w)
    dscores, selection = dscores.float().contiguous(), selection.contiguous()
    step = queries_of(batch, 1, top, q.shape[3])
    for first in range(0, seq if q.numel() else 0, step):
        part = slice(first, min(first + step, seq))
        own, weights, chosen = q[part], w[part], selection[part]
        kept = own.new_empty(len(own), batch, heads, top)
        tensors = dscores[part], own, k, weights, chosen, dq[part], dw[part], kept
        steps = *own.stride()[:3], *k.stride()[:2], *weights.stride()[:2]
        _chosen("_gradients", q).launch((len(own), batch), *tensors, *steps, top)
        add(dk.unsqueeze(2), kept, own, chosen)
    return dq, dk, dw
