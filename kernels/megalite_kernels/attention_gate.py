"""The gate of attention's output: a factor for each channel of each head (Qwen3-Next).

    y = x · σ(g)    dx = dy · σ(g)    dg = dy · x · σ(g) · (1 − σ(g))

σ is computed in at least fp32 and rounded to the dtype of g before the product. Backward needs only the
inputs: it computes y again for the weight gradient of the matmul that reads y, so that y is not kept.
"""

import torch
from torch import Tensor


def gate_output(x: Tensor, gate: Tensor) -> Tensor:
    """Return x · σ(gate), contiguous; both are [..., W] with any strides."""
    return torch.sigmoid(gate).mul_(x).contiguous()


def gate_output_backward(dy: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and gate."""
    factor = torch.sigmoid(gate)
    return dy * factor, torch.ops.aten.sigmoid_backward(dy * x, factor)
