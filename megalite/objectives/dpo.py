"""Direct preference optimization (Rafailov et al. 2023), with its hinge (SLiC, Zhao et al. 2023) and robust
(Chowdhury et al. 2024) losses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megalite.objectives.objective import PairObjective, Scores, log_sigmoid

if TYPE_CHECKING:
    from torch import Tensor

    from megalite.config.sections.preference import PreferenceConfig


def preference_loss(x: Tensor, loss: str, smoothing: float) -> Tensor:
    """Return the loss of each pair, given β times the difference of its scores.

    With ε the smoothing, the probability that a label is wrong:

        sigmoid    −(1 − ε) log σ(x) − ε log σ(−x)
        robust     (−(1 − ε) log σ(x) + ε log σ(−x)) / (1 − 2ε), whose mean over wrong labels is that of ε = 0
        hinge      max(0, 1 − x)
    """
    if loss == "hinge":
        return (1 - x).relu()
    right, wrong = -(1 - smoothing) * log_sigmoid(x), -smoothing * log_sigmoid(-x)
    return (right - wrong) / (1 - 2 * smoothing) if loss == "robust" else right + wrong


class DPO(PairObjective):
    """−log σ(β (r_chosen − r_rejected)), r = ℓ − ℓ_ref."""

    options: PreferenceConfig
    needs_reference = True

    def losses(self, chosen: Scores, rejected: Scores) -> Tensor:
        options = self.options
        x = options.beta * (chosen.log_ratio - rejected.log_ratio)
        return preference_loss(x, options.loss, options.label_smoothing)
