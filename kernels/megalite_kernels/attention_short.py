"""Plain causal attention of short sequences on a CPU, in as few operations as possible.

    p = softmax(mask + scale·q·kᵀ)    out = p·v
    dv = pᵀ·dout    ds = scale · p ∘ (dout·vᵀ − Σ_keys p∘(dout·vᵀ))    dq = ds·k    dk = dsᵀ·q

All keys are computed, also the half that causal attention hides: below LONGEST positions an operation costs
more than what blocks save. The g query heads that share a key-value head are rows of one matrix. Tensors of
one sample are not copied: batched matmuls read queries, keys and values where the projection wrote them.
All arithmetic is in at least fp32.
"""

import functools

import torch
from torch import Tensor

LONGEST = 64  # positions; see `attention` for the measurements


@functools.lru_cache(maxsize=16)
def _mask(sequence: int, group: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return 0 where a key is visible, else -inf: [g·S, S], row i·S + s of position s."""
    hidden = torch.ones(sequence, sequence, dtype=torch.bool, device=device).triu_(1)
    mask = torch.zeros(sequence, sequence, dtype=dtype, device=device)
    return mask.masked_fill_(hidden, -torch.inf).repeat(group, 1)


def rows_of(x: Tensor, kv_heads: int) -> Tensor:
    """Return [S, B, heads, D] as [B·kv_heads, g·S, D] in at least fp32; a view where the strides allow it."""
    sequence, batch, heads, dim = x.shape
    rows = x.permute(1, 2, 0, 3).reshape(batch * kv_heads, heads // kv_heads * sequence, dim)
    return rows if rows.dtype in (torch.float32, torch.float64) else rows.float()


def _heads(rows: Tensor, like: Tensor, heads: int) -> Tensor:
    """Return the inverse of `rows_of`, a view [S, B, heads, D], in the dtype of `like`."""
    sequence, batch = like.shape[:2]
    heads_first = rows.view(batch, heads, sequence, rows.shape[2]).permute(2, 0, 1, 3)
    return heads_first if rows.dtype == like.dtype else heads_first.to(like.dtype)


def _probabilities(query: Tensor, key: Tensor, scale: float) -> Tensor:
    sequence = key.shape[1]
    mask = _mask(sequence, query.shape[1] // sequence, query.dtype, query.device)
    return torch.softmax(torch.baddbmm(mask, query, key.transpose(1, 2), alpha=scale), -1)


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return out [S, B, hq, Dv], contiguous; `rows_of` q, k and v, and the probabilities [B·hk, g·S, S]."""
    kv_heads = k.shape[2]
    query, key, value = rows_of(q, kv_heads), rows_of(k, kv_heads), rows_of(v, kv_heads)
    if q.shape[1] > 1 or q.shape[2] > kv_heads:
        # all are copies: a view would keep the projection, from which the others were copied
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    probabilities = _probabilities(query, key, scale)
    out = _heads(torch.bmm(probabilities, value), q, q.shape[2]).contiguous()
    return out, (query, key, value, probabilities)


def backward(
    dout: Tensor, query: Tensor, key: Tensor, value: Tensor, probabilities: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq [S, B, hq, D], dk [S, B, hk, D] and dv [S, B, hk, Dv], of any strides.

    Args:
        query, key, value: the rows of the forward.
        probabilities: None: compute them again.
    """
    kv_heads = key.shape[0] // dout.shape[1]
    grad = rows_of(dout, kv_heads)
    if probabilities is None:
        probabilities = _probabilities(query, key, scale)
    dprobabilities = torch.bmm(grad, value.transpose(1, 2))
    dscores = torch._softmax_backward_data(dprobabilities, probabilities, -1, dprobabilities.dtype).mul_(
        scale
    )
    return (
        _heads(torch.bmm(dscores, key), dout, dout.shape[2]),
        _heads(torch.bmm(dscores.transpose(1, 2), query), dout, kv_heads),
        _heads(torch.bmm(probabilities.transpose(1, 2), grad), dout, kv_heads),
    )
