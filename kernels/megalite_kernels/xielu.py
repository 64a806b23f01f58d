"""xIELU (Huang and Schlag 2024), an activation with two trained numbers, for a plain feed-forward (Apertus).

    p = softplus(alpha_p)        n = β + softplus(alpha_n)        β = ½, ε = −10⁻⁶

    x > 0:   h = p · x² + β · x                               dh/dx = 2p · x + β
    x ≤ 0:   h = n · (expm1(min(x, ε)) − x) + β · x           dh/dx = n · (exp(x) · [x ≤ ε] − 1) + β

dp = Σ dh · x² over x > 0, dn = Σ dh · (expm1(min(x, ε)) − x) over the others, times the slopes of softplus.
All is computed in at least fp32 and rounded once. Backward needs only the input, as in `activation`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

BETA, EPS = 0.5, -1e-6


def _upcast(x: Tensor, *scalars: Tensor) -> tuple[Tensor, ...]:
    dtype = torch.promote_types(x.dtype, torch.float32)
    return tuple(each.to(dtype) for each in (x, *scalars))


def _curves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return what p and n are multiplied by: x² over x > 0, and expm1(min(x, ε)) − x over the others."""
    positive = torch.relu(x)
    return positive * positive, torch.expm1(x.clamp(max=EPS)).sub_(x).masked_fill_(x > 0, 0)


def xielu_forward(x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> Tensor:
    """Return xIELU of x, with the same shape and dtype; both alphas are [1]."""
    wide, p, n = _upcast(x, alpha_p, alpha_n)
    above, below = _curves(wide)
    h = above.mul_(F.softplus(p)).add_(below.mul_(F.softplus(n) + BETA))
    return h.add_(wide, alpha=BETA).to(x.dtype)


def xielu_backward(
    dh: Tensor, x: Tensor, alpha_p: Tensor, alpha_n: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dx, the gradients of both alphas ([1], in at least fp32), and h again."""
    wide, p, n = _upcast(x, alpha_p, alpha_n)
    grad, (above, below) = dh.to(wide.dtype), _curves(wide)
    gain_p, gain_n = F.softplus(p), F.softplus(n) + BETA
    # a sum over rows first: one over all elements would lose digits in fp32
    dalpha_p = (grad * above).sum(-1).sum().mul(torch.sigmoid(p))
    dalpha_n = (grad * below).sum(-1).sum().mul(torch.sigmoid(n))
    slope = (wide.exp().masked_fill_(wide > EPS, 0).sub_(1)).mul_(gain_n).masked_fill_(wide > 0, 0)
    slope.add_(torch.relu(wide).mul_(2 * gain_p)).add_(BETA)
    h = above.mul_(gain_p).add_(below.mul_(gain_n)).add_(wide, alpha=BETA)
    return slope.mul_(grad).to(x.dtype), dalpha_p, dalpha_n, h.to(x.dtype)
