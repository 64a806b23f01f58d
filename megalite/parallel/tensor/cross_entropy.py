"""Cross-entropy with logits split over the vocabulary, without gathering the full logits.

Forward: one all-gather of three or four numbers per token (largest logit, sum of exponentials, target logit,
and with label smoothing the sum of logits). Backward: no communication; the gradient overwrites the logits,
so that a second backward through them raises an error.

`loss_in_chunks` also computes the head that produces the logits, one chunk of tokens at a time, and the
gradients of each chunk together with its loss: the logits of only one chunk exist at a time. Its forward does
the communication of head and loss, forward and backward, once per chunk; its backward does none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from megalite_kernels.cross_entropy import combine, gradient_, statistics
from torch import Tensor

from megalite.mesh.mesh import MeshAxis
from megalite.parallel.collectives import all_gather
from megalite.parallel.microbatch import IGNORE_INDEX
from megalite.parallel.weight import Weight

NO_SECOND_DERIVATIVE = "the loss has no second derivative: call backward without create_graph"

ChunkLoss = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(chunk of the head's input [chunk, batch, hidden], its targets and their weights [tokens]) -> the loss, a
scalar."""


@dataclass(frozen=True)
class CrossEntropy:
    """Sum of token losses times `scale`, for logits [tokens, vocabulary/tp] and targets [tokens].

    Each loss, its smoothing and z-loss included, may have a weight. Padded columns (beyond the vocabulary)
    are excluded from the softmax. Targets of IGNORE_INDEX have a loss of 0. `label_smoothing` is spread over
    the global vocabulary (torch's convention); `z_loss` z adds z · lse².
    """

    tp: MeshAxis
    vocab_size: int
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    # called with the loss of every token times its weight, [tokens]
    observe: Callable[[Tensor], None] | None = None

    def __call__(
        self, logits: Tensor, targets: Tensor, scale: float | Tensor, weights: Tensor | None = None
    ) -> Tensor:
        """Compute the loss, a scalar in at least fp32. The logits are overwritten in backward.

        Args:
            weights: [tokens] in at least fp32; None: all weights are 1.
        """
        return _VocabParallelCrossEntropy.apply(logits, targets, scale, weights, self)

    def of_tokens(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of each token and its log-sum-exp for `gradient_`, [tokens] and [2, tokens].

        Communication: one all-gather of [k, tokens] statistics over tp.
        """
        first, valid = self.part(logits)
        # [k, tokens], k = 3 or 4
        own = statistics(logits, targets, first, valid, IGNORE_INDEX, self.label_smoothing > 0)
        stats = all_gather(own, self.tp).wait().view(self.tp.size, *own.shape)  # [tp, k, tokens]
        return combine(stats, targets, IGNORE_INDEX, self.label_smoothing, self.z_loss, self.vocab_size)

    def part(self, logits: Tensor) -> tuple[int, int]:
        """Return the first vocabulary index on this rank, and the number of columns without padding."""
        first = self.tp.rank * logits.shape[1]
        return first, max(0, min(logits.shape[1], self.vocab_size - first))


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Forward: all-gather of [k, tokens] statistics over tp. Backward: no communication."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, scale: Any, weights: Tensor | None, loss: CrossEntropy
    ) -> Tensor:
        losses, lse = loss.of_tokens(logits, targets)
        if weights is not None:
            losses = losses * weights
        ctx.save_for_backward(logits, targets, lse)
        ctx.scale, ctx.weights, ctx.loss = scale, weights, loss
        if loss.observe is not None:
            loss.observe(losses)
        return losses.sum() * scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError(NO_SECOND_DERIVATIVE)
        logits, targets, lse = ctx.saved_tensors
        loss = ctx.loss
        first, valid = loss.part(logits)
        scale = grads[0] * ctx.scale
        if ctx.weights is not None:
            scale = scale * ctx.weights.to(lse.dtype)  # a scalar does not widen weights
        terms = (first, valid, IGNORE_INDEX, loss.label_smoothing, loss.z_loss, loss.vocab_size)
        # In place: the logits, [tokens, vocabulary/tp], are usually the largest tensor of a step.
        gradient_(logits, targets, lse, scale, *terms)
        return logits, None, None, None, None


def loss_in_chunks(
    loss: ChunkLoss, x: Tensor, targets: Tensor, weight: Weight, length: int, weights: Tensor | None = None
) -> Tensor:
    """Compute the sum of `loss` over chunks of the head's input.

    If gradients are required, those of each chunk are computed together with its loss: the gradient of x is
    kept for backward, that of the weight is accumulated immediately, with all chunks as one contribution.
    Backward can therefore only run once, with a gradient of 1: any other factor could no longer be applied to
    the gradient of the weight, and raises an error.

    Args:
        x: [seq (/tp), batch, hidden].
        targets: [seq, batch]. Under sequence parallelism a chunk has the same rows of every tp rank's part of
            x.
        weight: the weight of the head.
        length: positions of x in a chunk.
        weights: of the targets, [seq, batch].
    """
    if torch.is_grad_enabled() and (x.requires_grad or weight.trainable):
        return _GradientWithLoss.apply(x, weight.tensor, loss, targets, weights, weight, length)
    return torch.stack([loss(*chunk) for chunk in chunks(x, length, targets, weights)]).sum()


def chunks(
    x: Tensor, length: int, targets: Tensor, weights: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Yield chunks of `length` positions of x, and the targets and weights of their tokens, [tokens] each."""

    def of_chunks(values: Tensor) -> Iterator[Tensor]:
        by_rank = values.unflatten(0, (-1, x.shape[0]))  # [ranks that split x, seq / ranks, batch]
        return (part.reshape(-1) for part in by_rank.split(length, dim=1))

    without = repeat(None, -(-len(x) // length))
    return zip(
        x.split(length), of_chunks(targets), without if weights is None else of_chunks(weights), strict=True
    )


class _GradientWithLoss(torch.autograd.Function):
    """Forward: loss and backward of every chunk, with communication. Backward: returns the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        _: Tensor,
        loss: ChunkLoss,
        targets: Tensor,
        weights: Tensor | None,
        weight: Weight,
        length: int,
    ) -> Tensor:
        losses, dx = [], torch.empty_like(x)  # dx: [seq (/tp), batch, hidden]
        parts = chunks(x, length, targets, weights)
        with weight.accumulate_as_one(), torch.enable_grad():
            for (part, its, its_weights), gradient in zip(parts, dx.split(length), strict=True):
                leaf = part.detach().requires_grad_(ctx.needs_input_grad[0])
                value = loss(leaf, its, its_weights)
                value.backward()  # frees the chunk's logits
                losses.append(value.detach())
                if leaf.grad is not None:
                    gradient.copy_(leaf.grad)
        ctx.save_for_backward(dx)
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError(NO_SECOND_DERIVATIVE)
        torch._assert_async(
            grads[0] == 1,
            "the gradient of a chunked loss must be 1, because its weight gradients have already "
            "been accumulated: scale the loss instead",
        )
        (dx,) = ctx.saved_tensors
        # a second backward must raise, because it would not add the gradient of the weight again
        torch.autograd.graph.increment_version(dx)
        return dx, None, None, None, None, None, None
