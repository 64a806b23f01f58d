"""A factor on queries that grows with the position (Ministral 3).

    q · (1 + β · log(1 + ⌊position / positions⌋))

Positions are those of tokens in their documents. The factor is 1 up to `positions`: shorter rows have no
factors, and cost nothing. No communication.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalite.config.sections.model import ModelConfig
from megalite.model.forward_state import ForwardState


def query_factors(model: ModelConfig, state: ForwardState, dtype: torch.dtype) -> Tensor | None:
    """Return the factors of a microbatch, [seq, 1 or batch, 1, 1], computed in at least fp32.

    None if they are 1.
    """
    beta, positions = model.query_scale_beta, model.query_scale_positions
    if beta is None or positions is None or _end(state) <= positions:
        return None
    steps = torch.div(state.document_positions, positions, rounding_mode="floor")
    wide = torch.promote_types(dtype, torch.float32)
    return (1 + beta * torch.log1p(steps.to(wide))).to(dtype)[:, :, None, None]


def _end(state: ForwardState) -> int:
    """Return a number that all positions of a microbatch are below, without a look at the device.

    Rows of generation differ: the longest one counts.
    """
    if state.segments:
        return max(start + length for start, length in state.segments)
    return state.length if state.lengths is None else max(state.lengths)


class ScaleQueries(torch.autograd.Function):
    """Multiplies queries [seq, batch, heads, head_dim] by factors [seq, 1 or batch, 1, 1]."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, factors: Tensor) -> Tensor:
        ctx.save_for_backward(factors)
        return queries * factors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (factors,) = ctx.saved_tensors
        return grads[0] * factors, None
