"""Odds ratio preference optimization (Hong et al. 2024)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megalite.objectives.objective import PairObjective, Scores, log_sigmoid

if TYPE_CHECKING:
    from torch import Tensor

LOG_HALF = -0.6931471805599453
LARGEST_MEAN = -(2.0**-53)
"""Largest mean log-probability whose odds differ from others in fp64."""


def log_odds(mean: Tensor) -> Tensor:
    """Return log(p / (1 − p)) for log p = `mean`, a mean log-probability below 0.

    log(1 − p) is log1p(−p) for small p and log(−expm1(log p)) for large p, so that neither cancels. A mean of
    0, to which a completion of few tokens rounds once it is certain, has finite odds without a gradient.
    """
    mean = mean.clamp(max=LARGEST_MEAN)
    # either form is computed where it is exact, and elsewhere at a point at which its gradient is finite
    small = mean.clamp(max=LOG_HALF)
    large = mean.clamp(min=LOG_HALF)
    log_rest = (-small.exp()).log1p().where(mean < LOG_HALF, (-large.expm1()).log())
    return mean - log_rest


class ORPO(PairObjective):
    """Negative log-likelihood of chosen prompts and completions − β log σ(o_chosen − o_rejected).

    o is the log-odds of a token of the completion: log(p / (1 − p)), log p = ℓ / n.
    """

    nll_weight = 1.0
    nll_of_prompts = True

    def losses(self, chosen: Scores, rejected: Scores) -> Tensor:
        return -self.options.beta * log_sigmoid(log_odds(chosen.mean) - log_odds(rejected.mean))

    def rewards(self, scores: Scores) -> Tensor:
        return self.options.beta * scores.mean
