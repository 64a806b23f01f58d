"""Cross-entropy over logits that are split by vocabulary: the whole logits are never gathered.

Forward: one all-gather of three or four numbers a token (largest logit, sum of exponentials, target logit, sum of logits). Backward: none;
the gradient is written over the logits, so a second backward through them raises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megalite_kernels.cross_entropy import combine, gradient_, statistics
from torch import Tensor

from megalite.batch import IGNORE_INDEX
from megalite.mesh import MeshAxis
from megalite.parallel.collectives import all_gather


@dataclass(frozen=True)
class CrossEntropy:
    """Sum of token losses times `scale`, for logits [tokens, vocabulary/tp] and targets [tokens].

    Padded columns (beyond the vocabulary) can not win: they take no part. Targets of IGNORE_INDEX cost nothing.
    Smoothing spreads `label_smoothing` over the global vocabulary (torch's convention); `z_loss` adds z · lse².
    """

    tp: MeshAxis
    vocab_size: int
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __call__(self, logits: Tensor, targets: Tensor, scale: float) -> Tensor:
        """The loss, a scalar in at least fp32. The logits are overwritten in backward."""
        return _VocabParallelCrossEntropy.apply(logits, targets, scale, self)

    def part(self, logits: Tensor) -> tuple[int, int]:
        """First vocabulary index of this rank's columns, and how many of them are real."""
        first = self.tp.rank * logits.shape[1]
        return first, max(0, min(logits.shape[1], self.vocab_size - first))


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Communication: see the module."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, scale: float, loss: CrossEntropy) -> Tensor:
        first, valid = loss.part(logits)
        own = statistics(logits, targets, first, valid, IGNORE_INDEX, loss.label_smoothing > 0)  # [k, tokens]
        stats = all_gather(own, loss.tp).wait().view(loss.tp.size, *own.shape)
        losses, lse = combine(stats, targets, IGNORE_INDEX, loss.label_smoothing, loss.z_loss, loss.vocab_size)
        ctx.save_for_backward(logits, targets, lse)
        ctx.scale, ctx.loss = scale, loss
        return losses.sum() * scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError("the loss has no second derivative: call backward without create_graph")
        logits, targets, lse = ctx.saved_tensors
        loss = ctx.loss
        first, valid = loss.part(logits)
        scale = grads[0] * ctx.scale
        gradient_(logits, targets, lse, scale, first, valid, IGNORE_INDEX, loss.label_smoothing, loss.z_loss, loss.vocab_size)
        return logits, None, None, None
