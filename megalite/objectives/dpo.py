"""Direct preference optimization (Rafailov et al. 2023) and its variants, which differ in the loss of a pair.

hinge is SLiC (Zhao et al. 2023); robust Chowdhury et al. 2024; exo_pair Ji et al. 2024; discopop Lu et al.
2024; nca_pair Chen et al. 2024; bco_pair Jung et al. 2024; sppo_hard Wu et al. 2024; apo_zero and apo_down
D'Oosterlinck et al. 2024.
"""

from __future__ import annotations

from math import log, log1p
from typing import TYPE_CHECKING

from megalite.objectives.objective import PairObjective, Scores, log_sigmoid

if TYPE_CHECKING:
    from torch import Tensor

    from megalite.config.sections.preference import PreferenceConfig


DISCOPOP_TEMPERATURE = 0.05
OF_REWARDS = ("nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down")
"""Losses of the two rewards of a pair, not of their difference alone."""


def preference_loss(x: Tensor, loss: str, smoothing: float) -> Tensor:
    """Return the loss of each pair, given β times the difference of its scores.

    With ε the smoothing, the probability that a label is wrong:

        sigmoid    −(1 − ε) log σ(x) − ε log σ(−x)
        robust     (−(1 − ε) log σ(x) + ε log σ(−x)) / (1 − 2ε), whose mean over wrong labels is that of ε = 0
        hinge      max(0, 1 − x)
        exo_pair   KL of (σ(x), σ(−x)) from (1 − ε, ε)
        discopop   −(1 − m) log σ(x) + m e^−x, m = σ(x / 0.05)
    """
    if loss == "hinge":
        return (1 - x).relu()
    if loss == "exo_pair":
        right, wrong = log_sigmoid(x), log_sigmoid(-x)
        return right.exp() * (right - log1p(-smoothing)) + wrong.exp() * (wrong - log(smoothing))
    if loss == "discopop":
        mixed = x / DISCOPOP_TEMPERATURE
        return (log_sigmoid(mixed) - x).exp() - (-mixed).sigmoid() * log_sigmoid(x)
    right, wrong = -(1 - smoothing) * log_sigmoid(x), -smoothing * log_sigmoid(-x)
    return (right - wrong) / (1 - 2 * smoothing) if loss == "robust" else right + wrong


def loss_of_rewards(chosen: Tensor, rejected: Tensor, loss: str, beta: float) -> Tensor:
    """Return the loss of each pair, given the rewards β r of its completions, [pairs] each.

    nca_pair   −log σ(c) − ½ log σ(−c) − ½ log σ(−j)
    bco_pair   −log σ(c) − log σ(−j), without the mean of rewards that the authors subtract
    sppo_hard  (r_c − 1 / 2β)² + (r_j + 1 / 2β)²
    apo_zero   1 − σ(c) + σ(j)
    apo_down   σ(c) + 1 − σ(c − j)
    """
    if loss == "nca_pair":
        return -log_sigmoid(chosen) - 0.5 * (log_sigmoid(-chosen) + log_sigmoid(-rejected))
    if loss == "bco_pair":
        return -log_sigmoid(chosen) - log_sigmoid(-rejected)
    if loss == "sppo_hard":
        return ((chosen - 0.5).square() + (rejected + 0.5).square()) / beta**2
    if loss == "apo_zero":
        return (-chosen).sigmoid() + rejected.sigmoid()
    return chosen.sigmoid() + (rejected - chosen).sigmoid()


class DPO(PairObjective):
    """−log σ(β (r_chosen − r_rejected)), r = ℓ − ℓ_ref, or another loss of these log-ratios.

    sigmoid_norm takes them per token: r / n.
    """

    options: PreferenceConfig
    needs_reference = True

    def losses(self, chosen: Scores, rejected: Scores) -> Tensor:
        options, one, other = self.options, chosen.log_ratio, rejected.log_ratio
        if options.loss in OF_REWARDS:
            return loss_of_rewards(options.beta * one, options.beta * other, options.loss, options.beta)
        if options.loss == "sigmoid_norm":
            one, other = one / chosen.completion_tokens, other / rejected.completion_tokens
        return preference_loss(options.beta * (one - other), options.loss, options.label_smoothing)
