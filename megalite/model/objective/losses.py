"""The loss of an objective over sequences, which the last stage computes in two passes over its head.

    ℓ_s = Σ log p(target)                       over the tokens of sequence s, prompts and completions apart
    loss = Σ_k scale_k · terms_k(ℓ)             `megalite.objectives`
    d loss = Σ_tokens w · d(−log p(target))     w = −∂loss/∂ℓ_s of the token's sequence

The first pass computes ℓ, without gradients; the second is a cross-entropy with the weights w. With loss
chunks both compute the logits of one chunk at a time. Communication: that of the head in each pass, and one
all-reduce of [2, sequences] numbers over cp, whose ranks have parts of the sequences. Every cp rank then
computes the same loss and weighs its own tokens, so the all-reduce has no backward; the first one reports the
loss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megalite.mesh.mesh import Mesh
from megalite.model.forward_state import ForwardState
from megalite.model.objective.counting import scores_of, sequences_of, sums_of_sequences
from megalite.model.objective.statistics import STATISTIC, TERMS
from megalite.objectives.objective import Objective, Scores
from megalite.parallel.collectives import all_reduce
from megalite.parallel.microbatch import Microbatch
from megalite.parallel.tensor.cross_entropy import chunks

if TYPE_CHECKING:
    from megalite.model.stage import Head


@torch.no_grad()
def token_losses(head: Head, x: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of each target, [seq, batch] in at least fp32, without a gradient.

    Args:
        x: the normed output of the last layer, [seq (/tp), batch, hidden].
        targets: [seq, batch].
    """
    length = head.chunk_length(x, targets) if head.chunk else len(x)
    losses = [
        head.loss.of_tokens(head.logits_of(part).flatten(0, 1), its)[0].view(-1, len(part), x.shape[1])
        for part, its, _ in chunks(x, length, targets)
    ]  # [ranks that split x, chunk, batch]
    return torch.cat(losses, 1).flatten(0, 1)


class HeadLosses(ABC):
    """Losses that the last stage computes in place of those of its head."""

    @abstractmethod
    def losses(self, x: Tensor, microbatch: Microbatch, state: ForwardState) -> tuple[Tensor, Tensor]:
        """Return the scaled loss to report, and the one to differentiate, [] each.

        Args:
            x: the output of the last layer, [seq (/tp), batch, hidden].
        """


class ObjectiveLosses(HeadLosses):
    """Losses of the last stage under an objective over sequences."""

    def __init__(self, objective: Objective, mesh: Mesh):
        self.objective, self.mesh = objective, mesh

    def evaluate(
        self,
        totals: Tensor,
        scores: Callable[[Tensor], Scores],
        factors: Sequence[float],
        state: ForwardState,
    ) -> tuple[Tensor, Tensor]:
        """Return the scaled loss, [], and its derivatives by the totals, and record what is reported.

        Args:
            totals: of the sequences, over all ranks that have parts of them.
            scores: returns the scores of the sequences, given their totals.
            factors: `Sequences.factors`.
        """
        with torch.enable_grad():
            leaf = totals.detach().requires_grad_()
            terms = self.objective.terms(scores(leaf))
            factors = factors or (1.0,) * len(terms)
            loss = torch.stack(
                [state.loss_scale * factor * term for factor, term in zip(factors, terms, strict=True)]
            ).sum()
            (slopes,) = torch.autograd.grad(loss, leaf)
        measures = self.objective.measures(scores(totals))
        values = [torch.stack(measures[name]).double() for name in self.objective.metrics]
        state.statistics[TERMS] = torch.stack(terms).detach()
        if values:
            state.statistics[STATISTIC] = torch.stack(values)
        return loss.detach(), slopes

    def reported(self, loss: Tensor) -> Tensor:
        """Return the loss on the first of the cp ranks, which all have the same, and 0 on the others."""
        return loss if self.mesh.cp.rank == 0 else torch.zeros_like(loss)


class SequenceLosses(ObjectiveLosses):
    """Losses under an objective that reads log-probabilities.

    Attributes:
        keeps_reference: whether a forward computes no loss, but keeps the scores of its sequences as those of
            the reference model.
    """

    def __init__(self, head: Head, objective: Objective, mesh: Mesh):
        super().__init__(objective, mesh)
        self.head, self.keeps_reference = head, False

    def losses(self, x: Tensor, microbatch: Microbatch, state: ForwardState) -> tuple[Tensor, Tensor]:
        head, sequences = self.head, sequences_of(microbatch)
        normed = head.norm(x)
        log_probabilities = -token_losses(head, normed.detach(), microbatch.targets)  # [seq, batch]
        sums = sums_of_sequences(log_probabilities, sequences)
        totals = all_reduce(sums, self.mesh.cp).wait()  # [2, sequences]
        if self.keeps_reference:
            microbatch.sequences = sequences._replace(reference=totals[1])
            return totals.new_zeros(()), totals.new_zeros(())
        loss, slopes = self.evaluate(totals, partial(scores_of, sequences), sequences.factors, state)
        if not torch.is_grad_enabled():
            return self.reported(loss), self.reported(loss)
        slopes = torch.cat([slopes, slopes.new_zeros(2, 1)], 1)  # of padding, whose index is −1
        weights = -slopes[sequences.completion.long(), sequences.index].to(log_probabilities.dtype)
        weighted = head.loss_of(normed, microbatch.targets, 1.0, head.loss, weights)
        return self.reported(loss), weighted

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Keep the scores of the forwards in the block as those of the reference model."""
        self.keeps_reference = True
        try:
            yield
        finally:
            self.keeps_reference = False
