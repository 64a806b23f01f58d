"""What a delta block computes for each token and head beside the recurrence, and its gradients.

    q, k ← x / √(Σ x² + 10⁻⁶)
    β = σ(b), or 2σ(b) with negative eigenvalues
    g = −exp(A_log) · softplus(a + dt_bias)

All of it is computed in at least fp32. No communication.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-6  # of the length of queries and keys


def unit_length(x: Tensor) -> Tensor:
    """Return x divided by its length over the last dimension."""
    upcast = x.to(torch.promote_types(x.dtype, torch.float32))
    return (upcast * torch.rsqrt(upcast.square().sum(-1, keepdim=True) + EPS)).to(x.dtype)


def unit_length_backward(dy: Tensor, x: Tensor) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    upcast, grad = x.to(dtype), dy.to(dtype)
    scale = torch.rsqrt(upcast.square().sum(-1, keepdim=True) + EPS)
    normed = upcast * scale
    return (scale * (grad - normed * (grad * normed).sum(-1, keepdim=True))).to(x.dtype)


def log_decay(a: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
    """Return g, [seq, batch, heads] or [seq, batch, heads, channels].

    Args:
        a: in the shape of g.
        a_log: [heads].
        dt_bias: [heads · channels].
    """
    rate, inner = _rate(a, a_log, dt_bias)
    return -rate * F.softplus(inner)


def log_decay_backward(
    dg: Tensor, a: Tensor, a_log: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of a, a_log and dt_bias."""
    rate, inner = _rate(a, a_log, dt_bias)
    dinner = -dg * rate * torch.sigmoid(inner)
    drate = -dg * rate * F.softplus(inner)
    over = tuple(range(3, a.ndim))
    per_head = drate.sum((0, 1, *over))
    return dinner.to(a.dtype), per_head, dinner.sum((0, 1)).flatten()


def _rate(a: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return exp(A_log) for each head, and the argument of softplus."""
    dtype = torch.promote_types(a.dtype, torch.float32)
    rate = a_log.to(dtype).exp()
    if a.ndim == 4:
        rate = rate.unsqueeze(-1)
    return rate, a.to(dtype) + dt_bias.to(dtype).view(a.shape[2:])
