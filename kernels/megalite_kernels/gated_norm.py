"""RMSNorm with a gate, over each group of the last dimension.

    norm first    y = w · x / rms(x) · act(z)             act: SiLU, or sigmoid
    gate first    y = w · u / rms(u), u = x · silu(z)

with rms(x) = √(mean x² + eps) over the group. `whole_forward` and `whole_backward` have all channels of each
group. Where a group is split over ranks, the sums over it are given from outside: `forward` takes that of
squares, `backward` that of `projections`. Computed in at least fp32. No communication.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite_kernels.backend import takes_triton

_GROUP_BYTES = 16384  # largest group that a kernel holds in registers

Gate = Literal["silu", "sigmoid", "gate_first"]


class GatedNormGradients(NamedTuple):
    """The gradients of x and z in their type, and of the weight in at least fp32, [channels]."""

    x: Tensor
    gate: Tensor
    weight: Tensor


def _takes_group(x: Tensor) -> bool:
    return takes_triton(x) and x.shape[-1] * x.element_size() <= _GROUP_BYTES


def whole_forward(x: Tensor, z: Tensor, weight: Tensor, gate: Gate, eps: float, rounded: bool) -> Tensor:
    """Return y, [.., groups, channels], of groups whose channels are all here.

    The arguments are as in `forward`.
    """
    if _takes_group(x):
        from megalite_kernels import gated_norm_triton

        return gated_norm_triton.gated_norm_forward(x, z, weight, gate, eps, rounded)
    return forward(x, z, weight, gate, eps, squares(x, z, gate), x.shape[-1], rounded)


def whole_backward(
    dy: Tensor, x: Tensor, z: Tensor, weight: Tensor, gate: Gate, eps: float
) -> GatedNormGradients:
    """Return the gradients of `whole_forward`."""
    if _takes_group(x):
        from megalite_kernels import gated_norm_triton

        return GatedNormGradients(*gated_norm_triton.gated_norm_backward(dy, x, z, weight, gate, eps))
    summed, width = squares(x, z, gate), x.shape[-1]
    projected = projections(dy, x, z, weight, gate, eps, summed, width)
    return backward(dy, x, z, weight, gate, eps, summed, width, projected)


def squares(x: Tensor, z: Tensor, gate: Gate) -> Tensor:
    """Return the sum of squares of each group, [.., groups, 1].

    Args:
        x, z: [.., groups, channels of a group].
    """
    return _normed_input(x, z, gate).square().sum(-1, keepdim=True)


def forward(
    x: Tensor, z: Tensor, weight: Tensor, gate: Gate, eps: float, summed: Tensor, width: int, rounded: bool
) -> Tensor:
    """Return y, [.., groups, channels of a group].

    Args:
        weight: [channels of a group] or [groups, channels of a group].
        summed: the sums of squares of whole groups, [.., groups, 1].
        width: the number of channels of a whole group.
        rounded: whether the normalized value is rounded to the type of x before it is multiplied.
    """
    normed = _normed_input(x, z, gate) * torch.rsqrt(summed / width + eps)
    if rounded:
        normed = normed.to(x.dtype)
    out = normed * weight
    if gate == "gate_first":
        return out.to(x.dtype)
    upcast = z.to(summed.dtype)
    return (out * (F.silu(upcast) if gate == "silu" else torch.sigmoid(upcast))).to(x.dtype)


def projections(
    dy: Tensor, x: Tensor, z: Tensor, weight: Tensor, gate: Gate, eps: float, summed: Tensor, width: int
) -> Tensor:
    """Return the sum over each group of the norm's gradient times its output, [.., groups, 1]."""
    normed = _normed_input(x, z, gate) * torch.rsqrt(summed / width + eps)
    return (_outer_gradient(dy, z, gate) * weight * normed).sum(-1, keepdim=True)


def backward(
    dy: Tensor,
    x: Tensor,
    z: Tensor,
    weight: Tensor,
    gate: Gate,
    eps: float,
    summed: Tensor,
    width: int,
    projected: Tensor,
) -> GatedNormGradients:
    """Return the gradients.

    Args:
        projected: `projections` of whole groups.
    """
    rstd = torch.rsqrt(summed / width + eps)
    normed = _normed_input(x, z, gate) * rstd
    grad = _outer_gradient(dy, z, gate)
    dweight = grad * normed
    over = range(dweight.ndim - weight.ndim)
    dweight = dweight.sum(tuple(over)) if over else dweight
    dnormed = rstd * (grad * weight - normed * (projected / width))
    upcast = z.to(summed.dtype)
    sigmoid = torch.sigmoid(upcast)
    if gate == "gate_first":
        dx, dgate, value = dnormed * upcast * sigmoid, dnormed, x.to(summed.dtype)
    else:
        dx, dgate, value = dnormed, dy.to(summed.dtype), normed * weight
    slope = sigmoid * (1 - sigmoid) if gate == "sigmoid" else sigmoid * (1 + upcast * (1 - sigmoid))
    return GatedNormGradients(dx.to(x.dtype), (dgate * value * slope).to(z.dtype), dweight)


def _normed_input(x: Tensor, z: Tensor, gate: Gate) -> Tensor:
    """Return what is normalized, in at least fp32."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.to(dtype) * F.silu(z.to(dtype)) if gate == "gate_first" else x.to(dtype)


def _outer_gradient(dy: Tensor, z: Tensor, gate: Gate) -> Tensor:
    """Return the gradient of the normalized value times the weight."""
    grad = dy.to(torch.promote_types(dy.dtype, torch.float32))
    if gate == "gate_first":
        return grad
    upcast = z.to(grad.dtype)
    return grad * (F.silu(upcast) if gate == "silu" else torch.sigmoid(upcast))
