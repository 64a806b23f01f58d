"""Attention from some positions of a sequence to others.

Results for several parts of the keys are merged by their log-sum-exp.

    lse = log Σ_keys exp(s)        out = Σ_keys (exp(s − lse) ∘ keep) · v

Scores s, keep and visibility are as in `attention`. Queries and keys are segments of consecutive positions,
(start, length) each, in ascending order. A query that sees none of the keys has out = 0 and lse = −inf.
Results of one query for two sets of keys merge into the result for their union (`merge_`):

    lse = log(exp(lse₁) + exp(lse₂))        out = exp(lse₁ − lse) · out₁ + exp(lse₂ − lse) · out₂

Backward takes lse and δ = Σ_dim dout∘out of *all* keys, so that its p = exp(s − lse) and ds = p ∘ (dp − δ)
equal those of attention to all keys: gradients for parts of the keys add up. Results are in at least fp32, so
that they can be merged and added.

The reference processes queries in blocks, each with only the keys that some query of the block can see. On a
GPU flash attention runs (`attention_part_triton`), in 16 bits and for heads of up to WIDEST channels.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megalite_kernels.attention import BLOCK, WIDEST, _heads, _rows, hidden_keys
from megalite_kernels.backend import takes_triton
from megalite_kernels.dropout import AttentionDropout

Segments = Sequence[tuple[int, int]]
"""Segments of consecutive positions: (start, length) each."""


class _SegmentBlock(NamedTuple):
    """Some queries of one segment, and the consecutive keys of one segment that any of them sees."""

    rows: slice  # the indices of the queries among all queries
    columns: slice  # the indices of the keys
    queries: range  # their positions
    keys: range
    hidden: Tensor | None  # [1 or B, 1, queries, 1, keys]; None: every query sees every key


def _blocks(
    queries: Segments, keys: Segments, window: int | None, document_start: Tensor | None, device: torch.device
) -> Iterator[_SegmentBlock]:
    row = 0
    for start, length in queries:
        for first in range(start, start + length, BLOCK):
            positions = range(first, min(first + BLOCK, start + length))
            rows = slice(row, row + len(positions))
            starts = None if document_start is None else document_start[rows]
            yield from _visible_keys(positions, rows, keys, window, starts, device)
            row = rows.stop


def _visible_keys(
    queries: range,
    rows: slice,
    keys: Segments,
    window: int | None,
    starts: Tensor | None,
    device: torch.device,
) -> Iterator[_SegmentBlock]:
    """Yield the blocks of some queries.

    Args:
        starts: [queries, B].
    """
    first = max(queries.start - window + 1, 0) if window else 0
    if starts is not None and starts.is_cpu:  # on a GPU reading the value would synchronize
        first = max(first, int(starts.min()))
    column = 0
    for start, length in keys:
        seen = range(max(start, first), min(start + length, queries.stop))
        if len(seen):
            columns = slice(column + seen.start - start, column + seen.stop - start)
            yield _SegmentBlock(rows, columns, queries, seen, _hidden(queries, seen, window, starts, device))
        column += length


def _hidden(
    queries: range, keys: range, window: int | None, starts: Tensor | None, device: torch.device
) -> Tensor | None:
    whole = keys.stop <= queries.start + 1 and (not window or queries.stop - 1 - keys.start < window)
    if whole and starts is None:
        return None
    i = torch.arange(queries.start, queries.stop, device=device)[:, None, None]
    j = torch.arange(keys.start, keys.stop, device=device)
    return hidden_keys(i, j, window, starts)


class _PartProblem:
    """The steps common to forward and backward of one call; matrices are rows of `attention._rows`."""

    def __init__(
        self, q: Tensor, k: Tensor, scale: float, softcap: float | None, dropout: AttentionDropout | None
    ):
        self.heads, self.kv_heads = q.shape[2], k.shape[2]
        self.group, self.softcap = self.heads // self.kv_heads, softcap
        self.dropout = dropout if dropout is not None and dropout.p else None
        self.query, self.key = _rows(q, self.kv_heads, scale), _rows(k, self.kv_heads)

    def rows(self, block: _SegmentBlock) -> slice:
        return slice(block.rows.start * self.group, block.rows.stop * self.group)

    def by_head(self, x: Tensor, block: _SegmentBlock) -> Tensor:
        """Return [B·kv_heads, queries·g, keys] viewed as [B, kv_heads, queries, g, keys]."""
        return x.view(-1, self.kv_heads, len(block.queries), self.group, len(block.keys))

    def scores(self, block: _SegmentBlock) -> Tensor:
        """Return masked and capped scores, [B·kv_heads, queries·g, keys]."""
        scores = torch.bmm(self.query[:, self.rows(block)], self.key[:, block.columns].transpose(1, 2))
        if self.softcap:
            scores.div_(self.softcap).tanh_().mul_(self.softcap)
        if block.hidden is not None:
            self.by_head(scores, block).masked_fill_(block.hidden, -torch.inf)
        return scores

    def drop(self, x: Tensor, block: _SegmentBlock) -> Tensor:
        """Return x ∘ keep: with dropout a new tensor, else x itself."""
        if self.dropout is None:
            return x
        keep = self.dropout.scale(self.heads, block.queries, block.keys, x.dtype)  # [B, heads, queries, keys]
        keep = keep.unflatten(1, (self.kv_heads, self.group)).transpose(2, 3)
        return self.by_head(x, block).mul(keep).view(x.shape)


def merge_(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Merge a result for other keys into out and lse, in place.

    out and other are [..., D], lse and other_lse [...], with −inf where no key was visible.
    """
    total = torch.logaddexp(lse, other_lse)
    at = torch.where(total == -torch.inf, 0, total)  # −inf − (−inf) would be NaN
    out.mul_((lse - at).exp_().unsqueeze(-1)).add_(other * (other_lse - at).exp_().unsqueeze(-1))
    lse.copy_(total)


def merged(results: Iterator[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return out and lse for all keys, merged from the results for each part of them.

    There is at least one part; parts are merged in their order.
    """
    out, lse = next(results)
    for other, other_lse in results:
        merge_(out, lse, other, other_lse)
    return out, lse


def _takes_flash(q: Tensor, v: Tensor) -> bool:
    """Return whether flash attention is used: not in fp32, whose matmuls would not use tensor cores."""
    narrow = max(q.shape[-1], v.shape[-1]) <= WIDEST
    return takes_triton(q) and narrow and (q.is_cpu or q.dtype != torch.float32)


def attention_part(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Segments,
    keys: Segments,
    *,
    scale: float,
    window: int | None = None,
    document_start: Tensor | None = None,
    softcap: float | None = None,
    dropout: AttentionDropout | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out [Sq, B, hq, Dv] and lse [Sq, B, hq], in at least fp32.

    Args:
        q: [Sq, B, hq, D] at the positions of `queries`.
        k, v: [Sk, B, hk, D] and [Sk, B, hk, Dv] at the positions of `keys`.
        document_start: [Sq, B], the position of the first token of each query's document.
        dropout: its position offset is added to all positions.
    """
    if _takes_flash(q, v):
        from megalite_kernels.attention_part_triton import flash_attention_part

        options = tuple(queries), tuple(keys), scale, window, document_start, softcap, dropout
        return flash_attention_part(q, k, v, *options)
    problem = _PartProblem(q, k, scale, softcap, dropout)
    value, query = _rows(v, problem.kv_heads), problem.query
    out = query.new_zeros(*query.shape[:2], value.shape[-1])
    lse = query.new_full(query.shape[:2], -torch.inf)
    for block in _blocks(queries, keys, window, document_start, q.device):
        rows, scores = problem.rows(block), problem.scores(block)
        part = torch.logsumexp(scores, -1)
        probabilities = scores.sub_(torch.where(part == -torch.inf, 0, part).unsqueeze(-1)).exp_()
        block_out = torch.bmm(problem.drop(probabilities, block), value[:, block.columns])
        merge_(out[:, rows], lse[:, rows], block_out, part)
    like = q.new_empty((*q.shape[:3], v.shape[-1]), dtype=out.dtype)
    lse = _heads(lse.unsqueeze(-1), like[..., :1], problem.kv_heads).squeeze(-1)
    return _heads(out, like, problem.kv_heads), lse


def delta(dout: Tensor, out: Tensor) -> Tensor:
    """Return δ = Σ_dim dout∘out, [S, B, heads] in at least fp32, of the output for all keys."""
    accumulate_dtype = torch.promote_types(out.dtype, torch.float32)
    return (dout.to(accumulate_dtype) * out.to(accumulate_dtype)).sum(-1)


def attention_part_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    queries: Segments,
    keys: Segments,
    *,
    scale: float,
    window: int | None = None,
    document_start: Tensor | None = None,
    softcap: float | None = None,
    dropout: AttentionDropout | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the parts of dq for these keys, and of dk and dv for these queries, in at least fp32.

    dq is [Sq, B, hq, D], dk [Sk, B, hk, D] and dv [Sk, B, hk, Dv].

    Args:
        lse, delta: [Sq, B, hq], of all keys that the queries see. Other arguments as in `attention_part`.
    """
    if _takes_flash(q, v):
        from megalite_kernels.attention_part_triton import flash_attention_part_backward

        options = tuple(queries), tuple(keys), scale, window, document_start, softcap, dropout
        return flash_attention_part_backward(dout, q, k, v, lse, delta, *options)
    problem = _PartProblem(q, k, scale, softcap, dropout)
    kv_heads, query, key = problem.kv_heads, problem.query, problem.key
    value, grad = _rows(v, kv_heads), _rows(dout, kv_heads)
    log_sum, inner = (_rows(x.unsqueeze(-1), kv_heads) for x in (lse, delta))  # [B·kv_heads, Sq·g, 1]
    dquery, dkey, dvalue = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for block in _blocks(queries, keys, window, document_start, q.device):
        rows, columns, scores = problem.rows(block), block.columns, problem.scores(block)
        probabilities = (scores - log_sum[:, rows]).exp_()  # 0 where hidden
        dvalue[:, columns].baddbmm_(problem.drop(probabilities, block).transpose(1, 2), grad[:, rows])
        dprobabilities = problem.drop(torch.bmm(grad[:, rows], value[:, columns].transpose(1, 2)), block)
        dscores = dprobabilities.sub_(inner[:, rows]).mul_(probabilities)
        if softcap:
            dscores.mul_(scores.masked_fill_(probabilities == 0, 0).div_(softcap).square_().neg_().add_(1))
        dquery[:, rows].baddbmm_(dscores, key[:, columns])
        dkey[:, columns].baddbmm_(dscores.transpose(1, 2), query[:, rows])

    def gradient(rows: Tensor, x: Tensor, factor: float = 1.0) -> Tensor:
        return _heads(rows, x.new_empty(x.shape, dtype=rows.dtype), kv_heads, factor)

    return gradient(dquery, q, scale), gradient(dkey, k), gradient(dvalue, v)
