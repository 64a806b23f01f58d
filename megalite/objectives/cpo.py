"""Contrastive preference optimization (Xu et al. 2024)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megalite.objectives.dpo import preference_loss
from megalite.objectives.objective import PairObjective, Scores

if TYPE_CHECKING:
    from torch import Tensor

    from megalite.config.sections.preference import PreferenceConfig


class CPO(PairObjective):
    """−log σ(β (ℓ_chosen − ℓ_rejected)) + negative log-likelihood of chosen completions."""

    options: PreferenceConfig
    nll_weight = 1.0

    def losses(self, chosen: Scores, rejected: Scores) -> Tensor:
        options = self.options
        x = options.beta * (chosen.completion - rejected.completion)
        return preference_loss(x, options.loss, options.label_smoothing)
