"""Attention sinks (Xiao et al. 2023, gpt-oss).

A sink is a learned score of a head that joins the softmax over the keys and has no value.

    p = exp(s) / (exp(sink) + Σ_keys exp(s))        out = (p ∘ keep) · v

Given lse and out of the keys alone, the sink enters at the end:

    lse' = log(exp(lse) + exp(sink))        out' = exp(lse − lse') · out

so any implementation that returns its log-sum-exp can be used, and parts of the keys are merged before.
Backward takes lse' and δ' = Σ_dim dout∘out' in place of lse and δ; for the sink, whose value is zero,

    dsink = −Σ_queries exp(sink − lse') · δ'
"""

from typing import Any

import torch
from torch import Tensor

from megalite_kernels.attention_part import attention_part, attention_part_backward, delta


def join(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return out' and lse', which include the sinks.

    out [..., heads, D] and lse [..., heads] are of all keys that a query sees, sinks [heads].
    """
    total = torch.logaddexp(lse, sinks.to(lse.dtype))
    return out * (lse - total).exp_().unsqueeze(-1), total


def sinks_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Return dsink [heads] in the dtype of lse, from lse' and δ' [S, B, heads]."""
    return -((sinks.to(lse.dtype) - lse).exp_() * delta).sum((0, 1))


def attention_with_sinks(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """Return causal attention of whole rows, and lse' for the backward.

    out is [S, B, hq, D] in the dtype of q, and lse' [S, B, hq].

    Args:
        sinks: [hq].
        options: as in `attention.attention`; `recompute` and `boundaries` have no effect: probabilities are
            never kept.
    """
    rows = [(0, len(q))]
    out, lse = join(*attention_part(q, k, v, rows, rows, **_part_options(options)), sinks)
    return out.to(q.dtype), lse


def attention_with_sinks_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sinks: Tensor, **options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dq, dk and dv in the dtype of q, and dsink [hq] in the dtype of lse.

    `out` and `lse` are as returned by the forward.
    """
    rows, inner = [(0, len(q))], delta(dout, out)
    dq, dk, dv = attention_part_backward(dout, q, k, v, lse, inner, rows, rows, **_part_options(options))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), sinks_gradient(sinks, lse, inner)


def _part_options(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in ("recompute", "boundaries")}
