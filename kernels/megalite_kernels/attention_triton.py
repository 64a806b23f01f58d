"""Flash attention: `attention.attention` and `attention.attention_backward` without a score matrix in memory.

A program of the forward kernel holds a tile of queries and loops over the keys that they see, a tile at a
time, with a running maximum m, sum l and output, all in fp32 and in powers of two (Dao, FlashAttention-2,
2023; x are scores, before the factor c = log₂e · scale):

    m' = max(m, c·max x)    p = 2^(c·x − m')    l = l·2^(m − m') + Σp    out = out·2^(m − m') + (p ∘ keep)·v
    lse = m + log₂ l

Backward computes p = 2^(c·x − lse) from the log-sum-exp, and Σ_keys p∘dp = Σ_dim dout∘out = δ. Each sum is
computed by one program in one order: there are no atomics, and results are bitwise reproducible. The first
kernel has a tile of queries per program and computes δ and dq; the second has a tile of keys per program,
loops over the queries of each head of the group that reads them, and computes dk and dv.

Keys that no query of a tile sees are never loaded. Tiles of keys that all its queries see come first, in a
loop without a mask; a second loop has the tiles on both sides of them (`APART`). With a soft-cap or dropout
one loop has all tiles: compared with their arithmetic a mask costs little, and the code is half as long. One
loop also computes dk and dv of wide heads, where two loops leave too few registers for a tile of 64 keys,
which Hopper's wgmma needs. For the same reason backward's loops are compiled without loop-invariant code
motion, which needs registers to save 2 of 300 instructions in a loop of 64 or 128 channels on Hopper.

The kernel reads the starts of documents, without host synchronization: document_start does not decrease along
the sequence, so its minimum and maximum in a tile of queries bound the keys, and for a tile of keys the tiles
of queries that see it are counted.

Queries and keys may be wider than values (`REST`): with the 192 and 128 channels of latent attention, tiles
have 128 channels of queries and keys and 64 more, as a tile's width is a power of two, and 256 would be a
third more than needed.

Dropout hashes (head, key position) and (sample, query position) as `dropout.AttentionDropout` does, with the
same bits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite_kernels import dropout
from megalite_kernels.dropout_triton import _A, _C, _keeps, _mix, _row_hash
from megalite_kernels.launch import Variant, architecture, operation

_LOG2E = tl.constexpr(math.log2(math.e))
# elements between two positions, at most: offsets within a tile of up to 128 positions are 32-bit
_FARTHEST = 2**24
_PROBES = tl.constexpr(128)  # tiles of queries whose document starts are read together
_WIDE = 256  # channels of keys and values together, above which one loop computes all of dk and dv


@triton.jit
def _load(
    matrix, first, stride, limit,
    ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Load [ROWS, WIDTH] from row `first` of a matrix [limit, DIM], zero beyond it; WHOLE: all rows exist."""
    row, channel = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    pointers = matrix + tl.cast(first, tl.int64) * stride + row * stride + channel
    if WHOLE:
        return tl.load(pointers) if DIM >= WIDTH else tl.load(pointers, mask=channel < DIM, other=0.0)
    return tl.load(pointers, mask=(first + row < limit) & (channel < DIM), other=0.0)


@triton.jit
def _rest(
    tile, matrix, first, stride, limit,
    ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Load the channels after the first WIDTH, which are in `tile`.

    Without any returns `tile`, which is not read.
    """
    return _load(matrix + WIDTH, first, stride, limit, ROWS, DIM - WIDTH, REST, WHOLE) if REST else tile


@triton.jit
def _raw_scores(x_tile, x_rest, y_tile, y_rest, REST: tl.constexpr):
    """Return the dot products of each row of x with each row of y, without the scale."""
    scores = tl.dot(x_tile, tl.trans(y_tile))
    if REST:
        scores = tl.dot(x_rest, tl.trans(y_rest), scores)
    return scores


@triton.jit
def _target(matrix, first, stride, limit, ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Return pointers to store a tile to, and which of its elements exist.

    The condition is written differently than in `_load`: otherwise the compiler would keep the common
    subexpression in registers in between.
    """
    row, channel = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    pointers = matrix + tl.cast(first, tl.int64) * stride + row * stride + channel
    return pointers, (row < limit - first) & (channel < DIM)


@triton.jit
def _capped(x, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """Return raw scores q·k unchanged, or with a soft-cap tanh(scale·q·k / cap)."""
    if SOFTCAP > 0:
        small = tl.exp2(tl.abs(x) * (-2 * SCALE / SOFTCAP * _LOG2E))
        tanh = (1.0 - small) / (1.0 + small)
        x = tl.where(x < 0, -tanh, tanh)
    return x


@triton.jit
def _exponent(x, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """Return the score as an exponent of two, from the result of `_capped`."""
    if SOFTCAP > 0:
        return x * (SOFTCAP * _LOG2E)
    return x * (SCALE * _LOG2E)


@triton.jit
def _first_key(starts, query, sequence, d_s, DOCUMENTS: tl.constexpr):
    """Return the first key of each query's document."""
    if DOCUMENTS:
        return tl.load(starts + tl.minimum(query, sequence - 1).to(tl.int64) * d_s).to(tl.int32)
    return query


@triton.jit
def _visible(query, key, first_key, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr):
    seen = key <= query
    if WINDOW:
        seen = seen & (query - key < WINDOW)
    if DOCUMENTS:
        seen = seen & (key >= first_key)
    return seen


@triton.jit
def _key_edges(
    first, sequence, first_key,
    WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr, APART: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Return the limits of the keys of a tile of queries.

    These are the begin of its keys, the begin and end of those that need no mask, and the end of its keys.
    """
    begin, unmasked = 0, 0
    if WINDOW:
        begin = tl.maximum(first - WINDOW + 1, 0)
        unmasked = tl.maximum(first + QUERIES - WINDOW, 0)
    if DOCUMENTS:
        begin = tl.maximum(begin, tl.min(first_key))
        unmasked = tl.maximum(unmasked, tl.max(first_key))
    begin, diagonal = begin // KEYS * KEYS, (first + 1) // KEYS * KEYS
    end = tl.minimum(first + QUERIES, sequence)
    if APART:
        return begin, tl.minimum(tl.cdiv(unmasked, KEYS) * KEYS, diagonal), diagonal, end
    return begin, begin, begin, end


@triton.jit
def _query_edges(
    first, sequence, starts, d_s,
    WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr, APART: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Return the limits of the queries that see a tile of keys.

    These are the begin of the queries that see any of it, the begin and end of those that need no mask, and
    the end of the queries that see any of it.
    """
    begin, end, unmasked = first // QUERIES * QUERIES, sequence, sequence
    if WINDOW:
        end = tl.minimum(end, first + KEYS - 1 + WINDOW)
        unmasked = tl.minimum(unmasked, (first + WINDOW) // QUERIES * QUERIES)
    if DOCUMENTS:
        seeing, seeing_all = tl.zeros([_PROBES], tl.int32), tl.zeros([_PROBES], tl.int32)
        for tile in range(0, tl.cdiv(sequence, QUERIES), _PROBES):
            query = (tile + tl.arange(0, _PROBES)) * QUERIES
            last = tl.minimum(query + QUERIES, sequence) - 1
            early = tl.load(starts + query.to(tl.int64) * d_s, mask=query < sequence, other=sequence)
            seeing += (early < first + KEYS).to(tl.int32)
            late = tl.load(starts + last.to(tl.int64) * d_s, mask=query < sequence, other=sequence)
            seeing_all += (late <= first).to(tl.int32)
        end = tl.minimum(end, tl.sum(seeing) * QUERIES)
        unmasked = tl.minimum(unmasked, tl.sum(seeing_all) * QUERIES)
    if APART:
        diagonal = tl.minimum(tl.cdiv(first + KEYS - 1, QUERIES) * QUERIES, end)
        return begin, diagonal, tl.maximum(unmasked, diagonal), end
    return begin, begin, begin, end


@triton.jit
def _length(edges, masked: tl.constexpr):
    """Return the number of positions that need a mask, or of those that do not.

    Positions that need one are on both sides of those that do not.
    """
    return edges[1] - edges[0] + edges[3] - edges[2] if masked else edges[2] - edges[1]


@triton.jit
def _place(edges, step, masked: tl.constexpr):
    """Return the position of the tile at `step` among the positions that `_length` counts."""
    if masked:
        return edges[0] + step + tl.where(edges[0] + step < edges[1], 0, edges[2] - edges[1])
    return edges[1] + step


@triton.jit(do_not_specialize=["d_s", "d_b", "sequence", "key", "first_head", "first_position"])
def _forward(
    q, k, v, out, lse, starts, samples,
    q_s, q_b, q_h, k_s, k_b, k_h, v_s, v_b, v_h, d_s, d_b,
    sequence, key, first_head, first_position,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr,
    P: tl.constexpr, THRESHOLD: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    REST: tl.constexpr, VDIM: tl.constexpr, VWIDTH: tl.constexpr, APART: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES  # tiles that see the most keys start first
    head, row = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    heads = tl.num_programs(1)
    query, lane = first + tl.arange(0, QUERIES), tl.arange(0, KEYS)
    k, v = k + row * k_b + head // GROUP * k_h, v + row * v_b + head // GROUP * v_h
    q += row * q_b + head * q_h
    q_tile = _load(q, first, q_s, sequence, QUERIES, DIM, WIDTH, False)
    q_rest = _rest(q_tile, q, first, q_s, sequence, QUERIES, DIM, WIDTH, REST, False)
    first_key = _first_key(starts + row * d_b, query, sequence, d_s, DOCUMENTS)
    if P > 0:
        query_hash = _row_hash(tl.load(samples + row), key, first_position + query)
        head_hash = (first_head + head.to(tl.int32) + 1) * _A
    edges = _key_edges(first, sequence, first_key, WINDOW, DOCUMENTS, APART, QUERIES, KEYS)
    # finite, so that p = 2^-inf = 0 in a row that has seen no key yet, not NaN
    largest = tl.full([QUERIES], -1e38, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    result = tl.zeros([QUERIES, VWIDTH], tl.float32)
    for masked in tl.static_range(0 if APART else 1, 2):
        for step in range(0, _length(edges, masked), KEYS):
            at = _place(edges, step, masked)
            k_tile = _load(k, at, k_s, sequence, KEYS, DIM, WIDTH, not masked)
            k_rest = _rest(k_tile, k, at, k_s, sequence, KEYS, DIM, WIDTH, REST, not masked)
            x = _capped(_raw_scores(q_tile, q_rest, k_tile, k_rest, REST), SCALE, SOFTCAP)
            if masked:
                seen = _visible(query[:, None], at + lane[None, :], first_key[:, None], WINDOW, DOCUMENTS)
                x = tl.where(seen, x, -float("inf"))
            larger = tl.maximum(largest, _exponent(tl.max(x, 1), SCALE, SOFTCAP))
            p = tl.exp2(_exponent(x, SCALE, SOFTCAP) - larger[:, None])
            shrink = tl.exp2(largest - larger)
            total = total * shrink + tl.sum(p, 1)
            if P > 0:
                key_hash = _mix((first_position + at + lane) * _C + head_hash)
                p = tl.where(_keeps(query_hash[:, None], key_hash[None, :], THRESHOLD), p, 0.0)
            v_tile = _load(v, at, v_s, sequence, KEYS, VDIM, VWIDTH, not masked)
            result = tl.dot(p.to(v_tile.dtype), v_tile, result * shrink[:, None])
            largest = larger
    result = result / (total * (1 - P))[:, None]
    own, stride = row * heads + head, tl.num_programs(2) * heads * VDIM
    to, exists = _target(out + own * VDIM, first, stride, sequence, QUERIES, VDIM, VWIDTH)
    tl.store(to, result.to(out.dtype.element_ty), mask=exists)
    tl.store(lse + own * sequence + query, largest + tl.log2(total), mask=query < sequence)


@triton.jit(do_not_specialize=["d_s", "d_b", "sequence", "key", "first_head", "first_position"])
def _backward_queries(
    q, k, v, dout, out, lse, delta, dq, starts, samples,
    q_s, q_b, q_h, k_s, k_b, k_h, v_s, v_b, v_h, d_s, d_b,
    sequence, key, first_head, first_position,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr,
    P: tl.constexpr, THRESHOLD: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    REST: tl.constexpr, VDIM: tl.constexpr, VWIDTH: tl.constexpr, APART: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES
    head, row = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    heads = tl.num_programs(1)
    line, own = tl.num_programs(2) * heads, row * heads + head  # of out, dout and dq, in rows of a head
    query, lane = first + tl.arange(0, QUERIES), tl.arange(0, KEYS)
    k, v = k + row * k_b + head // GROUP * k_h, v + row * v_b + head // GROUP * v_h
    q += row * q_b + head * q_h
    q_tile = _load(q, first, q_s, sequence, QUERIES, DIM, WIDTH, False)
    q_rest = _rest(q_tile, q, first, q_s, sequence, QUERIES, DIM, WIDTH, REST, False)
    grad = _load(dout + own * VDIM, first, line * VDIM, sequence, QUERIES, VDIM, VWIDTH, False)
    out_tile = _load(out + own * VDIM, first, line * VDIM, sequence, QUERIES, VDIM, VWIDTH, False)
    at_query = (row * heads + head) * sequence + query
    shift = tl.load(lse + at_query, mask=query < sequence, other=0.0)
    inner = tl.sum(grad.to(tl.float32) * out_tile.to(tl.float32), 1)
    tl.store(delta + at_query, inner, mask=query < sequence)
    first_key = _first_key(starts + row * d_b, query, sequence, d_s, DOCUMENTS)
    if P > 0:
        query_hash = _row_hash(tl.load(samples + row), key, first_position + query)
        head_hash = (first_head + head.to(tl.int32) + 1) * _A
    edges = _key_edges(first, sequence, first_key, WINDOW, DOCUMENTS, APART, QUERIES, KEYS)
    result = tl.zeros([QUERIES, WIDTH], tl.float32)
    rest = tl.zeros(q_rest.shape, tl.float32)
    for masked in tl.static_range(0 if APART else 1, 2):
        for step in tl.range(0, _length(edges, masked), KEYS, disable_licm=True):
            at = _place(edges, step, masked)
            k_tile = _load(k, at, k_s, sequence, KEYS, DIM, WIDTH, not masked)
            k_rest = _rest(k_tile, k, at, k_s, sequence, KEYS, DIM, WIDTH, REST, not masked)
            v_tile = _load(v, at, v_s, sequence, KEYS, VDIM, VWIDTH, not masked)
            x = _capped(_raw_scores(q_tile, q_rest, k_tile, k_rest, REST), SCALE, SOFTCAP)
            p = tl.exp2(_exponent(x, SCALE, SOFTCAP) - shift[:, None])
            if masked:
                seen = _visible(query[:, None], at + lane[None, :], first_key[:, None], WINDOW, DOCUMENTS)
                p = tl.where(seen, p, 0.0)
            dp = tl.dot(grad, tl.trans(v_tile))
            if P > 0:
                key_hash = _mix((first_position + at + lane) * _C + head_hash)
                keep = _keeps(query_hash[:, None], key_hash[None, :], THRESHOLD)
                dp = tl.where(keep, dp * (1 / (1 - P)), 0.0)
            ds = p * (dp - inner[:, None])
            if SOFTCAP > 0:
                ds = ds * (1.0 - x * x)
            result = tl.dot(ds.to(k_tile.dtype), k_tile, result)
            if REST:
                rest = tl.dot(ds.to(k_rest.dtype), k_rest, rest)
    to, exists = _target(dq + own * DIM, first, line * DIM, sequence, QUERIES, DIM, WIDTH)
    tl.store(to, (result * SCALE).to(dq.dtype.element_ty), mask=exists)
    if REST:
        to, exists = _target(dq + own * DIM + WIDTH, first, line * DIM, sequence, QUERIES, DIM - WIDTH, REST)
        tl.store(to, (rest * SCALE).to(dq.dtype.element_ty), mask=exists)


@triton.jit
def _with_queries(
    dv_tile, p, x, dp, inner, grad, sample, key, head, query, keys,
    SOFTCAP: tl.constexpr, P: tl.constexpr, THRESHOLD: tl.constexpr,
):  # fmt: skip
    """Return the gradient of the scores of a tile, and dv with the part of its queries added.

    p, x and dp are [keys, queries]; x is from `_capped`.
    """
    kept = p
    if P > 0:
        key_hash = _mix(keys * _C + (head + 1) * _A)
        keep = _keeps(_row_hash(sample, key, query)[None, :], key_hash[:, None], THRESHOLD)
        kept = tl.where(keep, p, 0.0)
        dp = tl.where(keep, dp * (1 / (1 - P)), 0.0)
    dv_tile = tl.dot(kept.to(grad.dtype), grad, dv_tile)
    ds = p * (dp - inner[None, :])
    if SOFTCAP > 0:
        ds = ds * (1.0 - x * x)
    return ds, dv_tile


@triton.jit(do_not_specialize=["d_s", "d_b", "sequence", "key", "first_head", "first_position"])
def _backward_keys(
    q, k, v, dout, lse, delta, dk, dv, starts, samples,
    q_s, q_b, q_h, k_s, k_b, k_h, v_s, v_b, v_h, d_s, d_b,
    sequence, key, first_head, first_position,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr,
    P: tl.constexpr, THRESHOLD: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    REST: tl.constexpr, VDIM: tl.constexpr, VWIDTH: tl.constexpr, APART: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * KEYS
    kv_head, row = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    heads, batch = tl.num_programs(1) * GROUP, tl.num_programs(2)
    keys, lane = first + tl.arange(0, KEYS), tl.arange(0, QUERIES)
    k += row * k_b + kv_head * k_h
    k_tile = _load(k, first, k_s, sequence, KEYS, DIM, WIDTH, False)
    k_rest = _rest(k_tile, k, first, k_s, sequence, KEYS, DIM, WIDTH, REST, False)
    v_tile = _load(v + row * v_b + kv_head * v_h, first, v_s, sequence, KEYS, VDIM, VWIDTH, False)
    starts += row * d_b
    edges = _query_edges(first, sequence, starts, d_s, WINDOW, DOCUMENTS, APART, QUERIES, KEYS)
    dk_tile = tl.zeros([KEYS, WIDTH], tl.float32)
    dv_tile = tl.zeros([KEYS, VWIDTH], tl.float32)
    dk_rest = tl.zeros(k_rest.shape, tl.float32)
    sample = tl.load(samples + row) if P > 0 else 0
    for masked in tl.static_range(0 if APART else 1, 2):
        tiles = tl.cdiv(_length(edges, masked), QUERIES)
        for step in tl.range(GROUP * tiles, disable_licm=True):  # heads of the group, one after the other
            head, at = kv_head * GROUP + step // tiles, _place(edges, step % tiles * QUERIES, masked)
            query, own = at + lane, row * heads + head
            q_head = q + row * q_b + head * q_h
            q_tile = _load(q_head, at, q_s, sequence, QUERIES, DIM, WIDTH, False)
            q_rest = _rest(q_tile, q_head, at, q_s, sequence, QUERIES, DIM, WIDTH, REST, False)
            grad = _load(dout + own * VDIM, at, batch * heads * VDIM, sequence, QUERIES, VDIM, VWIDTH, False)
            shift = tl.load(lse + own * sequence + query, mask=query < sequence, other=0.0)
            inner = tl.load(delta + own * sequence + query, mask=query < sequence, other=0.0)
            x = _capped(_raw_scores(k_tile, k_rest, q_tile, q_rest, REST), SCALE, SOFTCAP)
            p = tl.exp2(_exponent(x, SCALE, SOFTCAP) - shift[None, :])
            if masked:
                first_key = _first_key(starts, query, sequence, d_s, DOCUMENTS)
                seen = _visible(query[None, :], keys[:, None], first_key[None, :], WINDOW, DOCUMENTS)
                p = tl.where(seen, p, 0.0)
            ds, dv_tile = _with_queries(
                dv_tile, p, x, tl.dot(v_tile, tl.trans(grad)), inner, grad,
                sample, key, first_head + head.to(tl.int32), first_position + query, first_position + keys,
                SOFTCAP, P, THRESHOLD,
            )  # fmt: skip
            dk_tile = tl.dot(ds.to(q_tile.dtype), q_tile, dk_tile)
            if REST:
                dk_rest = tl.dot(ds.to(q_rest.dtype), q_rest, dk_rest)
    # of dk and dv, in rows of a head
    line, own_key = batch * tl.num_programs(1), row * tl.num_programs(1) + kv_head
    to, exists = _target(dk + own_key * DIM, first, line * DIM, sequence, KEYS, DIM, WIDTH)
    tl.store(to, (dk_tile * SCALE).to(dk.dtype.element_ty), mask=exists)
    if REST:
        to, exists = _target(dk + own_key * DIM + WIDTH, first, line * DIM, sequence, KEYS, DIM - WIDTH, REST)
        tl.store(to, (dk_rest * SCALE).to(dk.dtype.element_ty), mask=exists)
    to, exists = _target(dv + own_key * VDIM, first, line * VDIM, sequence, KEYS, VDIM, VWIDTH)
    tl.store(to, (dv_tile * (1 / (1 - P))).to(dv.dtype.element_ty), mask=exists)


class Tile(NamedTuple):
    """Tile sizes and launch options of a kernel.

    A program holds one tile of queries or keys, and loads tiles of the other side in turn.
    """

    queries: int
    keys: int
    warps: int
    stages: int


_KERNELS = {"forward": _forward, "dq": _backward_queries, "dk dv": _backward_keys}


@functools.cache
def _tables() -> dict[str, dict[str, list[list[int]]]]:
    """Return the tiles of each kernel by architecture.

    They are for heads of up to 64, 128 and 256 channels, and for 192 with values of 128.
    """
    import yaml

    return yaml.safe_load(Path(__file__).with_name("attention_tiles.yaml").read_text(encoding="utf-8"))


def _tile(target: str, kernel: str, width: int, heavy: bool) -> Tile:
    """Return the tile from the table.

    Args:
        width: the result of `tile_width`.
        heavy: whether the kernel has a soft-cap or dropout.
    """
    tables = _tables()[target]
    up_to_64, up_to_128, up_to_256, of_192 = (
        tables.get(f"{kernel} heavy", tables[kernel]) if heavy else tables[kernel]
    )
    if 128 < width < 256:
        return Tile(*of_192)
    return Tile(*(up_to_64 if width <= 64 else up_to_128 if width <= 128 else up_to_256))


def _widths(dim: int, value_dim: int) -> dict[str, int]:
    """Return the channels of keys and of values, and the widths of their tiles.

    Keys are loaded in two parts if their channels are fewer than a power of two.
    """
    width, rest, value_width = _power(dim), 0, _power(value_dim)
    if value_width <= 128 < dim <= 192:
        width, rest = 128, _power(dim - 128)
    return {"DIM": dim, "WIDTH": width, "REST": rest, "VDIM": value_dim, "VWIDTH": value_width}


def _power(channels: int) -> int:
    """Return the width of a tile of these channels: a power of two, as tl.dot needs it."""
    return max(triton.next_power_of_2(channels), 16)


def tile_width(constants: Mapping[str, Any]) -> int:
    """Return the larger number of channels of keys and values, by which the tables are indexed."""
    width: int = max(constants["WIDTH"] + constants["REST"], constants["VWIDTH"])
    return width


@functools.cache
def _variant(
    kernel: str,
    target: str,
    dim: int,
    value_dim: int,
    group: int,
    scale: float,
    softcap: float,
    window: int,
    documents: bool,
    p: float,
) -> Variant:
    widths = _widths(dim, value_dim)
    tile = _tile(target, kernel, tile_width(widths), bool(softcap or p))
    one_loop = kernel == "dk dv" and widths["WIDTH"] + widths["REST"] + widths["VWIDTH"] > _WIDE
    constants = {
        "SCALE": scale,
        "SOFTCAP": softcap,
        "WINDOW": window,
        "DOCUMENTS": documents,
        "P": p,
        "THRESHOLD": dropout.threshold(p),
        "GROUP": group,
        **widths,
        "QUERIES": tile.queries,
        "KEYS": tile.keys,
        "APART": not (softcap or p or one_loop),
    }
    return Variant(_KERNELS[kernel], constants, tile.warps, tile.stages)


def readable(x: Tensor) -> Tensor:
    """Return x, copied unless the kernels can read it in place."""
    return x if x.stride(-1) == 1 and x.stride(0) < _FARTHEST else x.contiguous()


def _launcher(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    scale: float,
    window: int | None,
    document_start: Tensor | None,
    softcap: float | None,
    samples: Tensor | None,
    key: int,
    p: float,
    first_head: int,
    first_position: int,
) -> Callable[..., None]:
    """Return a function that launches a kernel for an attention call.

    It takes a name in `_KERNELS` and the kernel's own tensors.
    """
    sequence, batch, heads, dim = q.shape
    kv_heads, matrices = k.shape[2], [readable(x) for x in (q, k, v)]
    starts = lse if document_start is None else document_start.to(torch.int64)
    origin = (0, 0) if document_start is None else starts.stride()
    shared = starts, lse if samples is None else samples.to(torch.int64).contiguous()
    strides = [stride for x in matrices for stride in x.stride()[:3]]
    masks = softcap or 0.0, window or 0, document_start is not None, p
    kind = architecture(q.device), dim, v.shape[-1], heads // kv_heads, scale, *masks

    def launch(kernel: str, *tensors: Tensor) -> None:
        variant, by_key = _variant(kernel, *kind), kernel == "dk dv"
        tile = variant.constants["KEYS" if by_key else "QUERIES"]
        grid = triton.cdiv(sequence, tile), kv_heads if by_key else heads, batch
        numbers = *strides, *origin, sequence, key, first_head, first_position
        variant.launch(grid, *matrices, *tensors, *shared, *numbers)

    return launch


def _like_out_and_lse(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    sequence, batch, heads, _ = q.shape
    out = q.new_empty(sequence, batch, heads, v.shape[-1])
    return out, q.new_empty((batch, heads, sequence), dtype=torch.float32)


@operation(fake=_like_out_and_lse)
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None,
    document_start: Tensor | None,
    softcap: float | None,
    samples: Tensor | None,
    key: int,
    p: float,
    first_head: int,
    first_position: int,
) -> tuple[Tensor, Tensor]:
    """Return out [S, B, hq, Dv] and the base-2 log-sum-exp of each query, fp32 [B, hq, S].

    Arguments as in `attention.attention`, with the fields of its dropout; p = 0: no dropout.
    """
    out, lse = _like_out_and_lse(q, k, v)
    if out.numel():
        options = scale, window, document_start, softcap, samples, key, p, first_head, first_position
        _launcher(q, k, v, lse, *options)("forward", out, lse)
    return out, lse


def _like_gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@operation(fake=_like_gradients)
def flash_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    window: int | None,
    document_start: Tensor | None,
    softcap: float | None,
    samples: Tensor | None,
    key: int,
    p: float,
    first_head: int,
    first_position: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv, contiguous."""
    dq, dk, dv = _like_gradients(dout, q, k, v)
    if dq.numel():
        options = scale, window, document_start, softcap, samples, key, p, first_head, first_position
        launch, dout, delta = _launcher(q, k, v, lse, *options), dout.contiguous(), torch.empty_like(lse)
        launch("dq", dout, out.contiguous(), lse, delta, dq)
        launch("dk dv", dout, lse, delta, dk, dv)
    return dq, dk, dv
