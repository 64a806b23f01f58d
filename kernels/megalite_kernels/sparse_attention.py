"""Attention of each query to the rows that it selects.

    s = scale · q · k        lse = log Σ exp(s)        out = Σ exp(s − lse) · v        over the selected rows

G key heads are shared by H query heads: query head h reads key head h // (H / G). With G = 1 the rows are
latents, which all heads share (the absorbed form of latent attention), and the values are the first channels
of the keys. A query that selects no row has out = 0 and lse = −inf. Computed in at least fp32.
See `selected_rows` for selections. No communication.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megalite_kernels.backend import takes_triton
from megalite_kernels.selected_rows import add, gather, parts

_WIDEST = 256  # channels of keys and values that the kernels take
_WIDEST_SHARED = 512, 64  # channels of values in the keys, and of the keys besides these


class SparseGradients(NamedTuple):
    """The gradients of q, in its type, and of keys and values, in at least fp32.

    `values` is None if the values are channels of the keys: their gradient is part of that of the keys.
    """

    q: Tensor
    keys: Tensor
    values: Tensor | None


def forward(
    q: Tensor, keys: Tensor, values: Tensor | int, selection: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the outputs [seq, batch, heads, dv], and lse [seq, batch, heads] in at least fp32.

    Args:
        q: [seq, batch, heads, dk].
        keys: [rows, batch, key heads, dk].
        values: [rows, batch, key heads, dv], or dv: the first channels of the keys are the values.
        selection: [seq, batch, top].
    """
    width = values if isinstance(values, int) else values.shape[-1]
    if _takes_kernel(q, keys, values):
        from megalite_kernels import sparse_attention_triton

        own = None if isinstance(values, int) else values
        return sparse_attention_triton.sparse_attention_forward(q, keys, own, width, selection, scale)
    problem = _Selected(q, keys, values, selection, scale)
    out = q.new_empty(*q.shape[:3], width)
    lse = q.new_empty(q.shape[:3], dtype=problem.dtype)
    for part in problem.parts():
        k, v = problem.rows(part)
        scores = problem.scores(part, k)
        total = scores.logsumexp(-1)
        out[part] = (_probabilities(scores, total) @ v).flatten(2, 3)
        lse[part] = total.flatten(2, 3)
    return out, lse


def backward(
    dout: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor | int,
    out: Tensor,
    lse: Tensor,
    selection: Tensor,
    scale: float,
) -> SparseGradients:
    """Return the gradients from that of the outputs, with arguments and results of `forward`."""
    if _takes_kernel(q, keys, values):
        from megalite_kernels import sparse_attention_triton

        own = None if isinstance(values, int) else values
        inputs = dout, q, keys, own, out, lse, selection, scale
        dq, dkeys, gradient = sparse_attention_triton.sparse_attention_backward(*inputs)
        return SparseGradients(dq, dkeys, None if own is None else gradient)
    problem = _Selected(q, keys, values, selection, scale)
    dq, dkeys = torch.empty_like(q), keys.new_zeros(keys.shape, dtype=problem.dtype)
    dvalues = values
    if isinstance(values, Tensor):
        dvalues = values.new_zeros(values.shape, dtype=problem.dtype)
    of_values = dvalues if isinstance(dvalues, Tensor) else dkeys[..., :dvalues]
    for part in problem.parts():
        k, v = problem.rows(part)
        p = _probabilities(problem.scores(part, k), problem.by_group(lse[part]))
        grad = problem.by_group(dout[part])
        delta = (grad * problem.by_group(out[part])).sum(-1, keepdim=True)
        dscores = p * (grad @ v.mT - delta) * scale
        dq[part] = (dscores @ k).flatten(2, 3)
        add(dkeys, dscores.flatten(2, 3), q[part], selection[part])
        add(of_values, p.flatten(2, 3), dout[part], selection[part])
    return SparseGradients(dq, dkeys, dvalues if isinstance(dvalues, Tensor) else None)


def probabilities(q: Tensor, keys: Tensor, selection: Tensor, lse: Tensor, scale: float) -> Tensor:
    """Return exp(s − lse) summed over the heads, [seq, batch, top] in at least fp32, zero where filled."""
    if _takes_kernel(q, keys, 1):
        from megalite_kernels import sparse_attention_triton

        return sparse_attention_triton.sparse_attention_probabilities(q, keys, selection, lse, scale)
    problem = _Selected(q, keys, 0, selection, scale)
    summed = torch.empty(selection.shape, dtype=problem.dtype, device=q.device)
    for part in problem.parts():
        scores = problem.scores(part, problem.rows(part)[0])
        summed[part] = _probabilities(scores, problem.by_group(lse[part])).sum((2, 3))
    return summed


def _takes_kernel(q: Tensor, keys: Tensor, values: Tensor | int) -> bool:
    if not takes_triton(q) or q.dtype.itemsize != 2 or q.dtype != keys.dtype:
        return False
    dim = q.shape[3]
    if isinstance(values, int):
        return values <= _WIDEST_SHARED[0] and dim <= sum(_WIDEST_SHARED)
    return values.dtype == q.dtype and dim <= _WIDEST and values.shape[3] <= _WIDEST


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """Return exp(s − lse), zero for a query that selects no row."""
    return (scores - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)).exp_()


class _Selected:
    """The steps common to forward and backward: matrices are [seq, batch, key heads, heads of each, …]."""

    def __init__(self, q: Tensor, keys: Tensor, values: Tensor | int, selection: Tensor, scale: float):
        self.q, self.keys, self.values, self.selection, self.scale = q, keys, values, selection, scale
        self.dtype = torch.promote_types(q.dtype, torch.float32)

    def parts(self) -> Iterator[slice]:
        rows, batch, groups, width = self.keys.shape
        heads, top = self.q.shape[2], self.selection.shape[2]
        return parts(len(self.q), batch * max(top * groups * width, heads * rows))

    def by_group(self, x: Tensor) -> Tensor:
        """Return [seq, batch, heads, …] as [seq, batch, key heads, heads of each, …]."""
        return x.to(self.dtype).unflatten(2, (self.keys.shape[2], -1))

    def rows(self, part: slice) -> tuple[Tensor, Tensor]:
        """Return the selected keys and values, [seq, batch, key heads, top, dk or dv]."""
        k = gather(self.keys, self.selection[part], self.dtype).transpose(2, 3)
        if isinstance(self.values, int):
            return k, k[..., : self.values]
        return k, gather(self.values, self.selection[part], self.dtype).transpose(2, 3)

    def scores(self, part: slice, k: Tensor) -> Tensor:
        scores = self.by_group(self.q[part]) @ k.mT * self.scale
        return scores.masked_fill_((self.selection[part] < 0)[:, :, None, None], -torch.inf)
