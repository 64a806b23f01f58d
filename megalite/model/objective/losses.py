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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megalite.mesh.mesh import Mesh
from megalite.model.forward_state import ForwardState
from megalite.model.objective.counting import scores_of, sequences_of, sums_of_sequences
from megalite.model.objective.statistics import STATISTIC, TERMS
from megalite.objectives.objective import Objective
from megalite.parallel.collectives import all_reduce
from megalite.parallel.microbatch import Microbatch
from megalite.parallel.sequences import Sequences
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


class SequenceLosses(HeadLosses):
    """Losses of the last stage under an objective over sequences.

    Attributes:
        keeps_reference: whether a forward computes no loss, but keeps the scores of its sequences as those of
            the reference model.
    """

    def __init__(self, head: Head, objective: Objective, mesh: Mesh):
        self.head, self.objective, self.mesh = head, objective, mesh
        self.keeps_reference = False

    def losses(self, x: Tensor, microbatch: Microbatch, state: ForwardState) -> tuple[Tensor, Tensor]:
        """Return the scaled loss to report, and the one to differentiate, [] each.

        Args:
            x: the output of the last layer, [seq (/tp), batch, hidden].
        """
        head, sequences = self.head, sequences_of(microbatch)
        normed = head.norm(x)
        log_probabilities = -token_losses(head, normed.detach(), microbatch.targets)  # [seq, batch]
        sums = sums_of_sequences(log_probabilities, sequences)
        totals = all_reduce(sums, self.mesh.cp).wait()  # [2, sequences]
        if self.keeps_reference:
            microbatch.sequences = sequences._replace(reference=totals[1])
            return totals.new_zeros(()), totals.new_zeros(())
        loss, slopes, terms = self._evaluate(totals, sequences, state.loss_scale)
        state.statistics |= self._statistics(totals, sequences, terms)
        own = loss if self.mesh.cp.rank == 0 else torch.zeros_like(loss)
        if not torch.is_grad_enabled():
            return own, own
        weights = -slopes[sequences.completion.long(), sequences.index].to(log_probabilities.dtype)
        weighted = head.loss_of(normed, microbatch.targets, 1.0, head.loss, weights)
        return own, weighted

    def _evaluate(
        self, totals: Tensor, sequences: Sequences, scale: float | Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss [], its derivatives by the scores [2, sequences + 1], and its terms [terms].

        The last derivative is 0: padding has the index −1.
        """
        with torch.enable_grad():
            leaf = totals.detach().requires_grad_()
            terms = self.objective.terms(scores_of(sequences, leaf))
            factors = sequences.factors or (1.0,) * len(terms)
            loss = torch.stack(
                [scale * factor * term for factor, term in zip(factors, terms, strict=True)]
            ).sum()
            (slopes,) = torch.autograd.grad(loss, leaf)
        padding = slopes.new_zeros(2, 1)
        return loss.detach(), torch.cat([slopes, padding], 1), torch.stack(terms).detach()

    def _statistics(self, totals: Tensor, sequences: Sequences, terms: Tensor) -> Mapping[str, Tensor]:
        """Return the sums that a step and a validation report."""
        measures = self.objective.measures(scores_of(sequences, totals))
        values = [torch.stack(measures[name]).double() for name in self.objective.metrics]
        return {TERMS: terms} | ({STATISTIC: torch.stack(values)} if values else {})

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Keep the scores of the forwards in the block as those of the reference model."""
        self.keeps_reference = True
        try:
            yield
        finally:
            self.keeps_reference = False
