"""Scores of an indexer, and the rows that each query selects by them (DeepSeek-V3.2, 2025).

    I(t, s) = Σ_h w(t, h) · relu(q(t, h) · k(s))        S(t): the rows s with the largest scores

All heads h share the keys k. A query sees rows at positions up to its own, from the start of its document.

A selection must not depend on how queries and keys are split over ranks or blocks. So `select` sums a score
in fp64 and rounds it to fp32: that hides the order of the sum. Of equal scores the lowest positions win.
Score and position of a row are packed into one integer, in whose upper half the bits of the score are in the
order of the scores: no two of a query are equal, and any algorithm for the largest ones selects the same.

`selected_scores` computes scores again where a query selects, in at least fp32, for a loss. Its gradient is
that of these; a selection has none. relu has gradient 0 at 0. See `selected_rows` for selections.
No communication.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megalite_kernels.backend import takes_triton
from megalite_kernels.selected_rows import add, gather, parts

_WIDEST, _HEADS = 256, 128  # channels and heads that the kernels take
_HIDDEN = torch.iinfo(torch.int64).min  # below every packed score


class ScoreGradients(NamedTuple):
    """The gradients of q, in its type, and of k and w, in at least fp32."""

    q: Tensor
    k: Tensor
    w: Tensor


def select(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    *,
    top: int,
    positions: Tensor,
    key_positions: Tensor | None = None,
    document_start: Tensor | None = None,
    exact: bool = True,
) -> Tensor:
    """Return the selection of each query, [seq, batch, top].

    Args:
        q: [seq, batch, heads, dim].
        k: [rows, batch, dim].
        w: [seq, batch, heads] in fp32, with the factors of the scores.
        positions: [seq, batch] or [seq, 1], the position of each query.
        key_positions: [rows, batch] or [rows, 1], all different; None: row i is at position i.
        document_start: [seq, batch] or [seq, 1], the position at which each query's document starts; None: 0.
        exact: False sums scores in fp32, which is faster on a GPU: the selection then depends on the order of
            the sum.
    """
    if _takes_kernel(q, k) and (exact or q.dtype.itemsize == 2):
        from megalite_kernels import index_scores_triton

        tables = positions, key_positions, document_start
        return index_scores_triton.index_scores_select(q, k, w, top, *tables, exact)
    seq, batch, heads = w.shape
    selection = torch.full((seq, batch, top), -1, dtype=torch.int32, device=q.device)
    dtype = torch.float64 if exact else torch.float32
    k, w = k.permute(1, 2, 0).to(dtype), w.to(dtype)
    for part in parts(seq, batch * heads * k.shape[2]):
        rows = k.shape[2]
        if key_positions is None and positions.is_cpu:  # on a GPU reading the value would synchronize
            rows = min(rows, int(positions[part].max()) + 1)
        at = _positions(rows, key_positions, q.device)
        keys = _packed(q[part], k[..., :rows], w[part], at)
        keys.masked_fill_(~_visible(at, positions[part], _part(document_start, part)), _HIDDEN)
        best, chosen = keys.topk(min(top, rows))
        selection[part, :, : min(top, rows)] = _ascending(chosen, best > _HIDDEN, rows)
    return selection


def visible_rows(
    positions: Tensor,
    rows: int,
    *,
    key_positions: Tensor | None = None,
    document_start: Tensor | None = None,
) -> Tensor:
    """Return all rows that each query sees as a selection, [seq, batch or 1, rows]; see `select`."""
    at = _positions(rows, key_positions, positions.device)
    visible = _visible(at, positions, document_start)
    return _ascending(torch.arange(rows, device=positions.device).expand(visible.shape), visible, rows)


def selected_scores(q: Tensor, k: Tensor, w: Tensor, selection: Tensor) -> Tensor:
    """Return the scores I of the selected rows, [seq, batch, top] in at least fp32.

    They are −inf where a selection is filled up.
    """
    if _takes_kernel(q, k) and q.dtype.itemsize == 2:
        from megalite_kernels import index_scores_triton

        return index_scores_triton.index_scores_selected(q, k, w, selection)
    scores = torch.empty(selection.shape, dtype=_wide(q), device=q.device)
    for part in _score_parts(q, k, selection):
        products = _products(q[part], gather(k, selection[part], scores.dtype))
        scores[part] = (w[part].to(scores.dtype).unsqueeze(2) @ products.relu_()).squeeze(2)
    return scores.masked_fill_(selection < 0, -torch.inf)


def selected_scores_backward(
    dscores: Tensor, q: Tensor, k: Tensor, w: Tensor, selection: Tensor
) -> ScoreGradients:
    """Return the gradients from those of `selected_scores`, of which filled ones are not used."""
    if _takes_kernel(q, k) and q.dtype.itemsize == 2:
        from megalite_kernels import index_scores_triton

        tensors = dscores, q, k, w, selection
        return ScoreGradients(*index_scores_triton.index_scores_selected_backward(*tensors))
    dtype = _wide(q)
    dq, dk = torch.empty_like(q), k.new_zeros(k.shape, dtype=dtype)
    dw = w.new_empty(w.shape, dtype=dtype)
    dscores = dscores.to(dtype).masked_fill(selection < 0, 0)
    for part in _score_parts(q, k, selection):
        rows = gather(k, selection[part], dtype)
        products, grad = _products(q[part], rows), dscores[part]
        dw[part] = (products.relu() @ grad.unsqueeze(3)).squeeze(3)
        dproducts = w[part].to(dtype).unsqueeze(3) * grad.unsqueeze(2) * (products > 0)
        dq[part] = dproducts @ rows
        add(dk.unsqueeze(2), dproducts, q[part], selection[part])
    return ScoreGradients(dq, dk, dw)


def _takes_kernel(q: Tensor, k: Tensor) -> bool:
    return takes_triton(q) and q.dtype == k.dtype and q.shape[2] <= _HEADS and q.shape[3] <= _WIDEST


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _score_parts(q: Tensor, k: Tensor, selection: Tensor) -> Iterator[slice]:
    _, batch, heads, dim = q.shape
    return parts(len(q), batch * max(selection.shape[2] * dim, heads * len(k)))


def _products(q: Tensor, rows: Tensor) -> Tensor:
    """Return q · k for the gathered rows [seq, batch, top, dim], [seq, batch, heads, top]."""
    return q.to(rows.dtype) @ rows.mT


def _part(x: Tensor | None, part: slice) -> Tensor | None:
    return None if x is None else x[part]


def _positions(rows: int, key_positions: Tensor | None, device: torch.device) -> Tensor:
    """Return the position of each row, [1 or batch, rows]."""
    return torch.arange(rows, device=device)[None] if key_positions is None else key_positions.t()


def _visible(at: Tensor, positions: Tensor, document_start: Tensor | None) -> Tensor:
    """Return which rows each query sees, [seq, batch or 1, rows]."""
    visible = at <= positions.unsqueeze(2)
    return visible if document_start is None else visible & (at >= document_start.unsqueeze(2))


def _packed(q: Tensor, k: Tensor, w: Tensor, at: Tensor) -> Tensor:
    """Return scores and positions of all rows in one integer each, [seq, batch, rows].

    Args:
        k: [batch, dim, rows], like w in the type of the sums.
        at: [1 or batch, rows].
    """
    seq, batch, heads, _ = q.shape
    products = q.to(k.dtype).transpose(0, 1).flatten(1, 2) @ k  # [batch, seq · heads, rows]
    products = products.relu_().view(batch, seq, heads, -1)
    scores = (w.transpose(0, 1).unsqueeze(2) @ products).squeeze(2).transpose(0, 1)
    bits = (scores.float() + 0.0).contiguous().view(torch.int32)  # −0.0 equals 0.0
    bits = bits ^ (bits >> 31 & 0x7FFFFFFF)  # below 0 the bits of larger magnitudes are larger
    return (bits.long() << 32) + (0xFFFFFFFF - at)


def _ascending(chosen: Tensor, exists: Tensor, rows: int) -> Tensor:
    """Return row indices as a selection."""
    ordered = chosen.masked_fill(~exists, rows).sort(-1).values
    return ordered.masked_fill_(ordered == rows, -1).int()
