"""Kahneman-Tversky optimization (Ethayarajh et al. 2024), of single completions that are good or bad."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megalite.objectives.objective import Metrics, Objective, Scores

if TYPE_CHECKING:
    from torch import Tensor

    from megalite.config.sections.preference import PreferenceConfig


class KTO(Objective):
    """good: λ_D (1 − σ(β (r − z))), bad: λ_U (1 − σ(β (z − r))), r = ℓ − ℓ_ref.

    z is the mean of r over prompts with the completions of other examples, at least 0, and a constant for the
    gradient. The loss is a mean over examples.
    """

    options: PreferenceConfig
    data = "labelled"
    needs_reference = True
    needs_baseline = True
    metrics = ("rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected", "kl")

    def terms(self, scores: Scores) -> list[Tensor]:
        options, good = self.options, scores.labels.to(scores.completion)
        assert scores.baseline is not None, "the trainer sets it, because needs_baseline is true"
        x = options.beta * (scores.log_ratio - scores.baseline)
        losses = good * options.desirable_weight * (-x).sigmoid()
        return [(losses + (1 - good) * options.undesirable_weight * x.sigmoid()).sum()]

    def counts(self, scores: Scores) -> list[Tensor]:
        return [scores.labels.new_tensor(len(scores.labels))]

    def measures(self, scores: Scores) -> Metrics:
        assert scores.baseline is not None, "as in terms"
        good, rewards = scores.labels.to(scores.completion), self.options.beta * scores.log_ratio
        bad, examples = 1 - good, good.new_tensor(len(good))
        values = [
            *((rewards * kind).sum() for kind in (good, bad)),
            *((scores.completion * kind).sum() for kind in (good, bad)),
            scores.baseline * examples,
        ]
        counts = [good.sum(), bad.sum(), good.sum(), bad.sum(), examples]
        return dict(zip(self.metrics, zip(values, counts, strict=True), strict=True))
