"""The gate of attention's output: a factor for each channel of each head (Qwen3-Next), or for each head
(Laguna).

    y = x · f(g)    dx = dy · f(g)    dg = dy · x · f′(g), summed over the channels that g is for

f is σ or softplus, computed in at least fp32 and rounded to the dtype of g before the product. Backward
needs only the inputs: it computes y again for the weight gradient of the matmul that reads y, so that y is
not kept.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

BEYOND = 20.0  # from here on softplus is its argument, as in torch
_LANES = 64  # elements of a CPU's widest vectors, two of them, in 16 bits


def _by_channel(x: Tensor, gate: Tensor) -> bool:
    return x.shape[-1] == gate.shape[-1]


def _of_heads(x: Tensor, gate: Tensor) -> Tensor:
    """Return x as [..., heads, D], for gates of heads."""
    return x.unflatten(-1, (gate.shape[-1], -1))


def _in_vectors(gate: Tensor) -> Tensor:
    """Return the gate in a memory order for which a CPU computes the same bits as for others.

    The rows of a part of a projection would each end in code for single numbers, which rounds f differently.
    """
    return gate.contiguous() if gate.is_cpu and gate.shape[-1] % _LANES else gate


def gate_output(x: Tensor, gate: Tensor, softplus: bool = False) -> Tensor:
    """Return x · f(gate), contiguous.

    Args:
        x: [..., W] with any strides.
        gate: the same, or [..., heads], of which each is for W / heads channels.
        softplus: whether f is softplus.
    """
    gate = _in_vectors(gate)
    factor = F.softplus(gate) if softplus else torch.sigmoid(gate)
    if _by_channel(x, gate):
        return factor.mul_(x).contiguous()
    return (_of_heads(x, gate) * factor.unsqueeze(-1)).flatten(-2)


def gate_output_backward(
    dy: Tensor, x: Tensor, gate: Tensor, softplus: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and gate."""
    gate = _in_vectors(gate)
    factor = F.softplus(gate) if softplus else torch.sigmoid(gate)
    if _by_channel(x, gate):
        dx, product = dy * factor, dy * x
    else:
        dx = (_of_heads(dy, gate) * factor.unsqueeze(-1)).flatten(-2)
        accumulate = torch.promote_types(dy.dtype, torch.float32)
        product = (_of_heads(dy, gate) * _of_heads(x, gate)).sum(-1, dtype=accumulate).to(dy.dtype)
    if softplus:
        return dx, torch.ops.aten.softplus_backward(product, gate, 1, BEYOND)
    return dx, torch.ops.aten.sigmoid_backward(product, factor)
