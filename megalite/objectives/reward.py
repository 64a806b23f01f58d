"""Reward models, after Bradley and Terry (1952): the probability that a completion is preferred to another is
the logistic function of the difference of their rewards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megalite.objectives.objective import Metrics, PairObjective, Scores, log_sigmoid

if TYPE_CHECKING:
    from torch import Tensor

    from megalite.config.sections.preference import PreferenceConfig


class Reward(PairObjective):
    """−log σ(R_chosen − R_rejected) + λ (R_chosen + R_rejected)², λ the option `center_rewards`.

    R is what the head of a reward model computes for the last token of a completion. The second term keeps
    the mean of rewards at 0 (Eisenstein et al. 2023).
    """

    options: PreferenceConfig
    reads = "rewards"
    metrics = PairObjective.metrics[:4]  # rewards; there are no log-probabilities

    def losses(self, chosen: Scores, rejected: Scores) -> Tensor:
        better, worse = self.rewards(chosen), self.rewards(rejected)
        return -log_sigmoid(better - worse) + self.options.center_rewards * (better + worse) ** 2

    def rewards(self, scores: Scores) -> Tensor:
        assert scores.reward is not None, "the objective reads rewards"
        return scores.reward

    def measures(self, scores: Scores) -> Metrics:
        return self.reward_measures(scores)
