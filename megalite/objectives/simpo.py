"""Simple preference optimization (Meng et al. 2024)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megalite.objectives.dpo import preference_loss
from megalite.objectives.objective import PairObjective, Scores

if TYPE_CHECKING:
    from torch import Tensor

    from megalite.config.sections.preference import PreferenceConfig


class SimPO(PairObjective):
    """−log σ(β (ℓ_chosen / n_chosen − ℓ_rejected / n_rejected) − γ)."""

    options: PreferenceConfig

    def losses(self, chosen: Scores, rejected: Scores) -> Tensor:
        options = self.options
        x = options.beta * (chosen.mean - rejected.mean) - options.gamma
        return preference_loss(x, "sigmoid", options.label_smoothing)

    def rewards(self, scores: Scores) -> Tensor:
        return self.options.beta * scores.mean
