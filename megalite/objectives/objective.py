"""What an objective is: a loss that is a differentiable function of sums over the sequences of a batch.

A sequence is a prompt and its completion. With ℓ the sum of the log-probabilities of the tokens of a
completion, n their number, and r = ℓ − ℓ_ref for a reference model:

    loss = Σ_k  (Σ over microbatches and ranks of terms_k) / (Σ over microbatches and ranks of counts_k)

The counts are known before the first backward, so that no layout changes the loss. The gradient needs no more
than ∂loss/∂ℓ of each sequence: it is that of a cross-entropy whose tokens have these weights
(`megalite.model.objective.losses`).

Objectives compute with methods of tensors only, so that a configuration is checked without torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from megalite.config.errors import ConfigError
from megalite.config.sections.preference import PreferenceConfig, scores_directory

if TYPE_CHECKING:
    from torch import Tensor

Metrics = dict[str, "tuple[Tensor, Tensor]"]
"""Name → the sum over the sequences of a microbatch, and the number by which the global sum is divided."""


class Scores(NamedTuple):
    """Sums over sequences, [sequences] fp64 each.

    Attributes:
        completion, prompt: log-probabilities of the tokens of completions and of prompts, natural logarithm.
        completion_tokens, prompt_tokens: numbers of these tokens. The first token of a sequence has no
            probability and is not counted.
        labels: 1 for a chosen or good completion, 0 for a rejected or bad one.
        reference: `completion` of the reference model; None if the objective needs none.
        baseline: [], the mean log-ratio of prompts with completions of other examples, over the global batch
            and at least 0; None if the objective needs none.
        reward: what the head of a reward model computes for the last token; None if the objective reads
            log-probabilities, which are otherwise 0.
    """

    completion: Tensor
    prompt: Tensor
    completion_tokens: Tensor
    prompt_tokens: Tensor
    labels: Tensor
    reference: Tensor | None = None
    baseline: Tensor | None = None
    reward: Tensor | None = None

    @property
    def mean(self) -> Tensor:
        """The mean log-probability of a completion's tokens."""
        return self.completion / self.completion_tokens

    @property
    def log_ratio(self) -> Tensor:
        """The log-probability of a completion relative to the reference model."""
        assert self.reference is not None, "an objective with a reference sets needs_reference"
        return self.completion - self.reference

    def pairs(self) -> tuple[Scores, Scores]:
        """Return the scores of chosen and of rejected completions, [pairs] each."""
        chosen, rejected = (
            Scores._make(None if each is None else each[first::2] for each in self) for first in (0, 1)
        )
        return chosen, rejected


def log_sigmoid(x: Tensor) -> Tensor:
    """Return log σ(x), without overflow."""
    return -(-x).logaddexp(x.new_zeros(()))


class Objective(ABC):
    """An objective over the sequences of a batch.

    Attributes:
        data: the data that it needs: text and conversations (tokens), pairs of a chosen and a rejected
            completion (pairs), or completions with a label (labelled).
        reads: what it needs of the sequences: log-probabilities of their tokens (likelihoods), or the rewards
            of a reward model.
        needs_reference: whether it needs the scores of a reference model.
        needs_baseline: whether it needs those of mismatched sequences as well.
        metrics: the names of `measures`.
        options: the section preference.
    """

    data: ClassVar[Literal["tokens", "pairs", "labelled"]]
    reads: ClassVar[Literal["likelihoods", "rewards"]] = "likelihoods"
    needs_reference: ClassVar[bool] = False
    needs_baseline: ClassVar[bool] = False
    metrics: ClassVar[Sequence[str]] = ()

    def __init__(self, options: PreferenceConfig):
        self.options = options

    @property
    def passes(self) -> int:
        """Number of forward passes of a batch before its step.

        That of the reference model, unless it has scores, and with a baseline those of both models on
        mismatched sequences.
        """
        return self.runs_reference + 2 * self.needs_baseline

    @property
    def runs_reference(self) -> bool:
        """Whether a forward pass of the reference model is part of a step."""
        return self.needs_reference and scores_directory(self.options) is None

    @abstractmethod
    def terms(self, scores: Scores) -> list[Tensor]:
        """Return the terms of the loss, summed over the sequences of a microbatch, [] each."""

    @abstractmethod
    def counts(self, scores: Scores) -> list[Tensor]:
        """Return what each term is divided by, summed over the sequences of a microbatch, [] each.

        Args:
            scores: with the numbers of tokens and the labels, but without log-probabilities (0).
        """

    def measures(self, scores: Scores) -> Metrics:
        """Return the metrics of a microbatch."""
        return {}


class PairObjective(Objective):
    """An objective that is a mean over pairs, and may add the likelihood of chosen completions.

    Attributes:
        nll_weight: the factor of the negative log-likelihood of chosen sequences, a mean over their tokens,
            unless preference.nll_weight sets it.
        nll_of_prompts: whether the tokens of prompts are a part of this likelihood.
    """

    data = "pairs"
    metrics: ClassVar[Sequence[str]] = (
        *("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"),
        *("logps/chosen", "logps/rejected"),
    )
    nll_weight: ClassVar[float] = 0.0
    nll_of_prompts: ClassVar[bool] = False

    @abstractmethod
    def losses(self, chosen: Scores, rejected: Scores) -> Tensor:
        """Return the loss of each pair, [pairs]."""

    def rewards(self, scores: Scores) -> Tensor:
        """Return the implicit reward of each completion, for metrics."""
        return self.options.beta * (scores.log_ratio if self.needs_reference else scores.completion)

    @property
    def _nll_weight(self) -> float:
        return self.nll_weight if self.options.nll_weight is None else self.options.nll_weight

    def terms(self, scores: Scores) -> list[Tensor]:
        chosen, rejected = scores.pairs()
        losses = self.losses(chosen, rejected)
        if losses.shape != chosen.completion.shape:
            raise ConfigError(
                f"{type(self).__name__}.losses must return the loss of each pair, not their sum or mean: "
                f"expected shape {list(chosen.completion.shape)}, got {list(losses.shape)}. Leave "
                "out sum() or mean()."
            )
        terms = [losses.sum()]
        if self._nll_weight:
            likelihood = chosen.completion + chosen.prompt if self.nll_of_prompts else chosen.completion
            terms.append(-self._nll_weight * likelihood.sum())
        return terms

    def counts(self, scores: Scores) -> list[Tensor]:
        chosen, _ = scores.pairs()
        counts = [chosen.labels.new_tensor(len(chosen.labels))]
        if self._nll_weight:
            tokens = chosen.completion_tokens
            counts.append((tokens + chosen.prompt_tokens if self.nll_of_prompts else tokens).sum())
        return counts

    def measures(self, scores: Scores) -> Metrics:
        likelihoods = scores.completion[0::2], scores.completion[1::2]
        pairs = scores.labels.new_tensor(len(likelihoods[0]))
        of_likelihoods = zip(self.metrics[4:], likelihoods, strict=True)
        return self.reward_measures(scores) | {name: (value.sum(), pairs) for name, value in of_likelihoods}

    def reward_measures(self, scores: Scores) -> Metrics:
        """Return the first four of the metrics."""
        rewards = self.rewards(scores)
        chosen, rejected = rewards[0::2], rewards[1::2]
        values = chosen, rejected, chosen - rejected, (chosen > rejected).to(chosen.dtype)
        pairs = chosen.new_tensor(len(chosen))
        return {name: (value.sum(), pairs) for name, value in zip(self.metrics[:4], values, strict=True)}
