"""What a mamba block computes for each token and head beside the recurrence, and its gradients.

    Δ = softplus(dt + dt_bias), within limits if there are some
    g = −Δ · exp(A_log)

All of it is computed in at least fp32. No communication.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class MambaStepGradients(NamedTuple):
    """The gradients of dt in its type, and of A_log and dt_bias in at least fp32, [heads]."""

    dt: Tensor
    a_log: Tensor
    dt_bias: Tensor


class MambaStep:
    """The steps Δ of tokens and what they depend on.

    Args:
        dt: [seq, batch, heads].
        a_log, dt_bias: [heads].
        limit: the smallest and the largest step; None: no limits.
    """

    def __init__(self, dt: Tensor, a_log: Tensor, dt_bias: Tensor, limit: list[float] | None):
        dtype = torch.promote_types(dt.dtype, torch.float32)
        self.dt, self.limit = dt, limit
        self.rate = a_log.to(dtype).exp()
        self.inner = dt.to(dtype) + dt_bias.to(dtype)
        self.free = F.softplus(self.inner)
        self.size = self.free if limit is None else self.free.clamp(*limit)

    @property
    def log_decay(self) -> Tensor:
        return -self.size * self.rate

    def gradients(self, dsize: Tensor, dlog_decay: Tensor) -> MambaStepGradients:
        """Return the gradients from those of the step and of the log decay."""
        da_log = (dlog_decay * self.log_decay).sum((0, 1))
        dinner = (dsize - dlog_decay * self.rate) * torch.sigmoid(self.inner)
        if self.limit is not None:
            low, high = self.limit
            dinner = dinner * ((self.free >= low) & (self.free <= high))
        return MambaStepGradients(dinner.to(self.dt.dtype), da_log, dinner.sum((0, 1)))
