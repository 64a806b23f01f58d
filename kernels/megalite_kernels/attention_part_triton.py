"""Flash attention from segments of queries to segments of keys.

The kernels compute `attention_part.attention_part` and its backward without a score matrix in memory.

The mathematics, the loops with and without a mask, and the tiles are as in `attention_triton`. The
differences: a tile lies in one segment of positions, and a table gives its first position, its first row and
the end of the segment's rows by its number; a program loops over the segments of the other side (first
position, first row, length), and skips the positions of each that it cannot see; and δ is an argument of
backward.

log-sum-exps are natural logarithms, −inf for a query that sees none of the keys. Results are fp32.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import functools
import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite_kernels import attention_triton
from megalite_kernels.attention_triton import (
    _LOG2E,
    _PROBES,
    Tile,
    _capped,
    _exponent,
    _first_key,
    _length,
    _load,
    _place,
    _raw_scores,
    _rest,
    _tables,
    _target,
    _visible,
    _with_queries,
    readable,
    tile_width,
)
from megalite_kernels.dropout import AttentionDropout
from megalite_kernels.dropout_triton import _A, _C, _keeps, _mix, _row_hash
from megalite_kernels.launch import Variant, architecture, upload

Segments = tuple[tuple[int, int], ...]
"""Segments of consecutive positions: (start, length) each."""

_LN2 = tl.constexpr(math.log(2))
_COLUMNS = tl.constexpr(3)  # of both tables


@triton.jit
def _row_of(table, number):
    """Return row `number` of a table."""
    at = table + number * _COLUMNS
    return tl.load(at), tl.load(at + 1), tl.load(at + 2)


@triton.jit
def _key_edges(
    first, length, first_key,
    WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr, APART: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Return the limits of the keys that a tile of queries sees in a segment.

    These are the begin of the keys that any query sees, the begin and end of those that need no mask, and the
    end. All, including `first` and `first_key`, are counted from the begin of the segment; the queries may be
    before it.
    """
    low, unmasked = tl.cast(0, tl.int32), tl.cast(0, tl.int32)
    if WINDOW:
        low = tl.maximum(low, first - WINDOW + 1)
        unmasked = tl.maximum(unmasked, first + QUERIES - WINDOW)
    if DOCUMENTS:
        low = tl.maximum(low, tl.min(first_key))
        unmasked = tl.maximum(unmasked, tl.max(first_key))
    high = tl.maximum(tl.minimum(first + QUERIES, length), 0)
    begin = tl.minimum(low, high) // KEYS * KEYS
    high = tl.where(low < high, high, begin)
    if APART:
        seen_by_all = tl.maximum(tl.minimum(first + 1, high), 0) // KEYS * KEYS
        left = tl.maximum(tl.minimum(tl.cdiv(unmasked, KEYS) * KEYS, seen_by_all), begin)
        right = tl.maximum(seen_by_all, left)
        return begin, left, right, tl.maximum(high, right)
    return begin, begin, begin, high


@triton.jit
def _query_edges(
    first, length, starts, d_s, position,
    WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr, APART: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Return the limits of the queries in a segment that see a tile of keys.

    These are the begin of the queries that see any key, the begin and end of those that need no mask, and the
    end. All, including `first`, are counted from the begin of the segment; `position` is the position of the
    first key, and `starts` points to the document starts of the segment.
    """
    begin, high, unmasked = tl.minimum(tl.maximum(first, 0), length) // QUERIES * QUERIES, length, length
    if WINDOW:
        high = tl.minimum(high, tl.maximum(first + KEYS - 1 + WINDOW, 0))
        unmasked = tl.minimum(unmasked, tl.maximum(first + WINDOW, 0) // QUERIES * QUERIES)
    if DOCUMENTS:
        seeing, seeing_all = tl.zeros([_PROBES], tl.int32), tl.zeros([_PROBES], tl.int32)
        for tile in range(0, tl.cdiv(length, QUERIES), _PROBES):
            query = (tile + tl.arange(0, _PROBES)) * QUERIES
            last, exists = tl.minimum(query + QUERIES, length) - 1, query < length
            early = tl.load(starts + query.to(tl.int64) * d_s, mask=exists, other=0)
            late = tl.load(starts + last.to(tl.int64) * d_s, mask=exists, other=0)
            seeing += (exists & (early < position + KEYS)).to(tl.int32)
            seeing_all += (exists & (late <= position)).to(tl.int32)
        high = tl.minimum(high, tl.sum(seeing) * QUERIES)
        unmasked = tl.minimum(unmasked, tl.sum(seeing_all) * QUERIES)
    high = tl.maximum(high, begin)
    if first >= length:  # all keys are after the segment
        high = begin
    if APART:
        left = tl.minimum(tl.cdiv(tl.maximum(first + KEYS - 1, 0), QUERIES) * QUERIES, high)
        left = tl.maximum(left, begin)
        return begin, left, tl.maximum(tl.minimum(unmasked, high), left), high
    return begin, begin, begin, high


@triton.jit(do_not_specialize=["d_s", "d_b", "size", "count", "key", "first_head", "first_position"])
def _forward(
    q, k, v, out, lse, starts, samples, tiles, segments,
    q_s, q_b, q_h, k_s, k_b, k_h, v_s, v_b, v_h, d_s, d_b,
    size, count, key, first_head, first_position,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr,
    P: tl.constexpr, THRESHOLD: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    REST: tl.constexpr, VDIM: tl.constexpr, VWIDTH: tl.constexpr, APART: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    # tiles that see the most keys start first
    first, first_row, limit = _row_of(tiles, tl.num_programs(0) - 1 - tl.program_id(0))
    head, row = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    heads, batch = tl.num_programs(1), tl.num_programs(2)
    query_lane, lane = tl.arange(0, QUERIES), tl.arange(0, KEYS)
    query = first + query_lane
    k, v = k + row * k_b + head // GROUP * k_h, v + row * v_b + head // GROUP * v_h
    q += row * q_b + head * q_h
    q_tile = _load(q, first_row, q_s, limit, QUERIES, DIM, WIDTH, False)
    q_rest = _rest(q_tile, q, first_row, q_s, limit, QUERIES, DIM, WIDTH, REST, False)
    first_key = _first_key(starts + row * d_b, first_row + query_lane, limit, d_s, DOCUMENTS)
    if P > 0:
        query_hash = _row_hash(tl.load(samples + row), key, first_position + query)
        head_hash = (first_head + head.to(tl.int32) + 1) * _A
    # finite, so that p = 2^-inf = 0 in a row that has seen no key yet, not NaN
    largest = tl.full([QUERIES], -1e38, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    result = tl.zeros([QUERIES, VWIDTH], tl.float32)
    for segment in range(count):
        start, base, length = _row_of(segments, segment)
        edges = _key_edges(first - start, length, first_key - start, WINDOW, DOCUMENTS, APART, QUERIES, KEYS)
        for masked in tl.static_range(0 if APART else 1, 2):
            for step in range(0, _length(edges, masked), KEYS):
                at = _place(edges, step, masked)
                k_tile = _load(k, base + at, k_s, base + length, KEYS, DIM, WIDTH, not masked)
                k_rest = _rest(k_tile, k, base + at, k_s, base + length, KEYS, DIM, WIDTH, REST, not masked)
                x = _capped(_raw_scores(q_tile, q_rest, k_tile, k_rest, REST), SCALE, SOFTCAP)
                if masked:
                    position = start + at + lane[None, :]
                    seen = _visible(query[:, None], position, first_key[:, None], WINDOW, DOCUMENTS)
                    x = tl.where(seen & (at + lane < length)[None, :], x, -float("inf"))
                larger = tl.maximum(largest, _exponent(tl.max(x, 1), SCALE, SOFTCAP))
                p = tl.exp2(_exponent(x, SCALE, SOFTCAP) - larger[:, None])
                shrink = tl.exp2(largest - larger)
                total = total * shrink + tl.sum(p, 1)
                if P > 0:
                    key_hash = _mix((first_position + start + at + lane) * _C + head_hash)
                    p = tl.where(_keeps(query_hash[:, None], key_hash[None, :], THRESHOLD), p, 0.0)
                v_tile = _load(v, base + at, v_s, base + length, KEYS, VDIM, VWIDTH, not masked)
                result = tl.dot(p.to(v_tile.dtype), v_tile, result * shrink[:, None])
                largest = larger
    sees = total > 0
    total = tl.where(sees, total, 1.0)
    result = result / (total * (1 - P))[:, None]
    own, stride = row * heads + head, batch * heads * VDIM
    to, exists = _target(out + own * VDIM, first_row, stride, limit, QUERIES, VDIM, VWIDTH)
    tl.store(to, result, mask=exists)
    log_sum = tl.where(sees, (largest + tl.log2(total)) * _LN2, -float("inf"))
    at_query = own * size + first_row + query_lane
    tl.store(lse + at_query, log_sum, mask=first_row + query_lane < limit)


@triton.jit(do_not_specialize=["d_s", "d_b", "size", "count", "key", "first_head", "first_position"])
def _backward_queries(
    q, k, v, dout, lse, delta, dq, starts, samples, tiles, segments,
    q_s, q_b, q_h, k_s, k_b, k_h, v_s, v_b, v_h, d_s, d_b,
    size, count, key, first_head, first_position,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr,
    P: tl.constexpr, THRESHOLD: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    REST: tl.constexpr, VDIM: tl.constexpr, VWIDTH: tl.constexpr, APART: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    first, first_row, limit = _row_of(tiles, tl.num_programs(0) - 1 - tl.program_id(0))
    head, row = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    heads, batch = tl.num_programs(1), tl.num_programs(2)
    line, own = batch * heads, row * heads + head  # of out, dout and dq, in rows of a head
    query_lane, lane = tl.arange(0, QUERIES), tl.arange(0, KEYS)
    query = first + query_lane
    k, v = k + row * k_b + head // GROUP * k_h, v + row * v_b + head // GROUP * v_h
    q += row * q_b + head * q_h
    q_tile = _load(q, first_row, q_s, limit, QUERIES, DIM, WIDTH, False)
    q_rest = _rest(q_tile, q, first_row, q_s, limit, QUERIES, DIM, WIDTH, REST, False)
    grad = _load(dout + own * VDIM, first_row, line * VDIM, limit, QUERIES, VDIM, VWIDTH, False)
    at_query = own * size + first_row + query_lane
    exists_query = first_row + query_lane < limit
    shift = tl.load(lse + at_query, mask=exists_query, other=0.0) * _LOG2E
    inner = tl.load(delta + at_query, mask=exists_query, other=0.0)
    first_key = _first_key(starts + row * d_b, first_row + query_lane, limit, d_s, DOCUMENTS)
    if P > 0:
        query_hash = _row_hash(tl.load(samples + row), key, first_position + query)
        head_hash = (first_head + head.to(tl.int32) + 1) * _A
    result = tl.zeros([QUERIES, WIDTH], tl.float32)
    rest = tl.zeros(q_rest.shape, tl.float32)
    for segment in range(count):
        start, base, length = _row_of(segments, segment)
        edges = _key_edges(first - start, length, first_key - start, WINDOW, DOCUMENTS, APART, QUERIES, KEYS)
        for masked in tl.static_range(0 if APART else 1, 2):
            for step in tl.range(0, _length(edges, masked), KEYS, disable_licm=True):
                at = _place(edges, step, masked)
                k_tile = _load(k, base + at, k_s, base + length, KEYS, DIM, WIDTH, not masked)
                k_rest = _rest(k_tile, k, base + at, k_s, base + length, KEYS, DIM, WIDTH, REST, not masked)
                v_tile = _load(v, base + at, v_s, base + length, KEYS, VDIM, VWIDTH, not masked)
                x = _capped(_raw_scores(q_tile, q_rest, k_tile, k_rest, REST), SCALE, SOFTCAP)
                p = tl.exp2(_exponent(x, SCALE, SOFTCAP) - shift[:, None])
                if masked:
                    position = start + at + lane[None, :]
                    seen = _visible(query[:, None], position, first_key[:, None], WINDOW, DOCUMENTS)
                    p = tl.where(seen & (at + lane < length)[None, :], p, 0.0)
                dp = tl.dot(grad, tl.trans(v_tile))
                if P > 0:
                    key_hash = _mix((first_position + start + at + lane) * _C + head_hash)
                    keep = _keeps(query_hash[:, None], key_hash[None, :], THRESHOLD)
                    dp = tl.where(keep, dp * (1 / (1 - P)), 0.0)
                ds = p * (dp - inner[:, None])
                if SOFTCAP > 0:
                    ds = ds * (1.0 - x * x)
                result = tl.dot(ds.to(k_tile.dtype), k_tile, result)
                if REST:
                    rest = tl.dot(ds.to(k_rest.dtype), k_rest, rest)
    to, exists = _target(dq + own * DIM, first_row, line * DIM, limit, QUERIES, DIM, WIDTH)
    tl.store(to, result * SCALE, mask=exists)
    if REST:
        to, exists = _target(dq + own * DIM + WIDTH, first_row, line * DIM, limit, QUERIES, DIM - WIDTH, REST)
        tl.store(to, rest * SCALE, mask=exists)


@triton.jit(do_not_specialize=["d_s", "d_b", "size", "count", "key", "first_head", "first_position"])
def _backward_keys(
    q, k, v, dout, lse, delta, dk, dv, starts, samples, tiles, segments,
    q_s, q_b, q_h, k_s, k_b, k_h, v_s, v_b, v_h, d_s, d_b,
    size, count, key, first_head, first_position,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr,
    P: tl.constexpr, THRESHOLD: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    REST: tl.constexpr, VDIM: tl.constexpr, VWIDTH: tl.constexpr, APART: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    first, first_row, limit = _row_of(tiles, tl.program_id(0))
    kv_head, row = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    heads, batch = tl.num_programs(1) * GROUP, tl.num_programs(2)
    keys, lane = first + tl.arange(0, KEYS), tl.arange(0, QUERIES)
    k += row * k_b + kv_head * k_h
    k_tile = _load(k, first_row, k_s, limit, KEYS, DIM, WIDTH, False)
    k_rest = _rest(k_tile, k, first_row, k_s, limit, KEYS, DIM, WIDTH, REST, False)
    v_tile = _load(v + row * v_b + kv_head * v_h, first_row, v_s, limit, KEYS, VDIM, VWIDTH, False)
    starts += row * d_b
    dk_tile = tl.zeros([KEYS, WIDTH], tl.float32)
    dv_tile = tl.zeros([KEYS, VWIDTH], tl.float32)
    dk_rest = tl.zeros(k_rest.shape, tl.float32)
    sample = tl.load(samples + row) if P > 0 else 0
    for segment in tl.range(count, disable_licm=True):
        start, base, length = _row_of(segments, segment)
        run_starts = starts + base.to(tl.int64) * d_s
        edges = _query_edges(
            first - start, length, run_starts, d_s, first, WINDOW, DOCUMENTS, APART, QUERIES, KEYS
        )
        for masked in tl.static_range(0 if APART else 1, 2):
            visits = tl.cdiv(_length(edges, masked), QUERIES)
            # heads of the group, one after the other
            for step in tl.range(GROUP * visits, disable_licm=True):
                head, at = kv_head * GROUP + step // visits, _place(edges, step % visits * QUERIES, masked)
                query, query_row, end = start + at + lane, base + at + lane, base + length
                q_head = q + row * q_b + head * q_h
                q_tile = _load(q_head, base + at, q_s, end, QUERIES, DIM, WIDTH, False)
                q_rest = _rest(q_tile, q_head, base + at, q_s, end, QUERIES, DIM, WIDTH, REST, False)
                own, stride = row * heads + head, batch * heads * VDIM
                grad = _load(dout + own * VDIM, base + at, stride, end, QUERIES, VDIM, VWIDTH, False)
                at_query = own * size + query_row
                shift = tl.load(lse + at_query, mask=at + lane < length, other=0.0) * _LOG2E
                inner = tl.load(delta + at_query, mask=at + lane < length, other=0.0)
                x = _capped(_raw_scores(k_tile, k_rest, q_tile, q_rest, REST), SCALE, SOFTCAP)
                p = tl.exp2(_exponent(x, SCALE, SOFTCAP) - shift[None, :])
                if masked:
                    first_key = _first_key(starts, query_row, end, d_s, DOCUMENTS)
                    seen = _visible(query[None, :], keys[:, None], first_key[None, :], WINDOW, DOCUMENTS)
                    p = tl.where(seen, p, 0.0)
                ds, dv_tile = _with_queries(
                    dv_tile, p, x, tl.dot(v_tile, tl.trans(grad)), inner, grad,
                    sample, key, first_head + head.to(tl.int32), first_position + query,
                    first_position + keys, SOFTCAP, P, THRESHOLD,
                )  # fmt: skip
                dk_tile = tl.dot(ds.to(q_tile.dtype), q_tile, dk_tile)
                if REST:
                    dk_rest = tl.dot(ds.to(q_rest.dtype), q_rest, dk_rest)
    # of dk and dv, in rows of a head
    line, own_key = batch * tl.num_programs(1), row * tl.num_programs(1) + kv_head
    to, exists = _target(dk + own_key * DIM, first_row, line * DIM, limit, KEYS, DIM, WIDTH)
    tl.store(to, dk_tile * SCALE, mask=exists)
    if REST:
        to_rest = dk + own_key * DIM + WIDTH
        to, exists = _target(to_rest, first_row, line * DIM, limit, KEYS, DIM - WIDTH, REST)
        tl.store(to, dk_rest * SCALE, mask=exists)
    to, exists = _target(dv + own_key * VDIM, first_row, line * VDIM, limit, KEYS, VDIM, VWIDTH)
    tl.store(to, dv_tile * (1 / (1 - P)), mask=exists)


_KERNELS = {"forward": _forward, "dq": _backward_queries, "dk dv": _backward_keys}


def _tile(target: str, kernel: str, width: int, heavy: bool) -> Tile:
    """Return the tile from the table: for segments (`runs`) if the table has one, else the kernel's."""
    own = f"{kernel} runs heavy" if heavy else f"{kernel} runs"
    return attention_triton._tile(target, own if own in _tables()[target] else kernel, width, heavy)


@functools.cache
def _variant(kernel: str, target: str, *shape) -> Variant:
    """`attention_triton._variant` with the kernel of this file."""
    constants = attention_triton._variant(kernel, target, *shape).constants
    tile = _tile(target, kernel, tile_width(constants), bool(constants["SOFTCAP"] or constants["P"]))
    constants = {**constants, "QUERIES": tile.queries, "KEYS": tile.keys}
    return Variant(_KERNELS[kernel], constants, tile.warps, tile.stages)


def _table(rows: list[tuple[int, int, int]], device: torch.device) -> Tensor:
    """Return a table on the device. Segments by a batch's documents have other tables in every step."""
    return upload(torch.tensor(rows, dtype=torch.int32).reshape(-1, _COLUMNS.value), device)


@functools.lru_cache(maxsize=256)
def _tile_table(segments: Segments, tile: int, device: torch.device) -> Tensor:
    """Return the table of tiles, in ascending order of positions.

    Each row has the first position of a tile, its first row, and the end of its segment's rows.
    """
    tiles, row = [], 0
    for start, length in segments:
        tiles += [(start + offset, row + offset, row + length) for offset in range(0, length, tile)]
        row += length
    return _table(sorted(tiles), device)


@functools.lru_cache(maxsize=256)
def _segment_table(segments: Segments, device: torch.device) -> Tensor:
    """Return a table with the first position, the first row and the length of each segment."""
    rows, row = [], 0
    for start, length in segments:
        rows.append((start, row, length))
        row += length
    return _table(rows, device)


def _launcher(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    unread: Tensor,
    queries: Segments,
    keys: Segments,
    scale: float,
    window: int | None,
    document_start: Tensor | None,
    softcap: float | None,
    dropout: AttentionDropout | None,
) -> Callable[..., None]:
    """Return a function that launches a kernel for an attention call.

    It takes a name in `_KERNELS` and the kernel's own tensors.

    Args:
        unread: passed in place of tensors that are not read.
    """
    batch, heads, dim = q.shape[1:]
    kv_heads, matrices = k.shape[2], [readable(x) for x in (q, k, v)]
    starts = unread if document_start is None else document_start.to(torch.int64)
    origin = (0, 0) if document_start is None else starts.stride()
    if dropout is None or not dropout.p:
        dropout = AttentionDropout(0, unread, 0.0)
    shared = starts, dropout.samples.to(torch.int64).contiguous() if dropout.p else unread
    strides = [stride for x in matrices for stride in x.stride()[:3]]
    masks = softcap or 0.0, window or 0, document_start is not None, dropout.p
    draw = dropout.key, dropout.head_offset, dropout.position_offset
    kind = architecture(q.device), dim, v.shape[-1], heads // kv_heads, scale, *masks

    def launch(kernel: str, *tensors: Tensor) -> None:
        variant, by_key = _variant(kernel, *kind), kernel == "dk dv"
        own, other = (keys, queries) if by_key else (queries, keys)
        tiles = _tile_table(own, variant.constants["KEYS" if by_key else "QUERIES"], q.device)
        segments = _segment_table(other, q.device)
        grid = len(tiles), kv_heads if by_key else heads, batch
        numbers = *strides, *origin, len(q), len(segments), *draw
        variant.launch(grid, *matrices, *tensors, *shared, tiles, segments, *numbers)

    return launch


def flash_attention_part(q: Tensor, k: Tensor, v: Tensor, *options) -> tuple[Tensor, Tensor]:
    """Return out [Sq, B, hq, Dv] and lse [Sq, B, hq], fp32. Options as in `attention_part`, in order."""
    sequence, batch, heads, _ = q.shape
    shapes = (*q.shape[:3], v.shape[-1]), (batch, heads, sequence)
    out, lse = (torch.empty(shape, dtype=torch.float32, device=q.device) for shape in shapes)
    if out.numel():
        _launcher(q, k, v, lse, *options)("forward", out, lse)
    return out, lse.permute(2, 0, 1)


def flash_attention_part_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, *options
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv, fp32."""
    dq, dk, dv = (torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v))
    # [B, hq, Sq]: a tile's numbers are adjacent
    lse, delta = (x.permute(1, 2, 0).contiguous() for x in (lse, delta))
    launch, dout = _launcher(q, k, v, lse, *options), dout.contiguous()
    if dq.numel():
        launch("dq", dout, lse, delta, dq)
    if dk.numel():
        launch("dk dv", dout, lse, delta, dk, dv)
    return dq, dk, dv
