"""Identity preference optimization (Azar et al. 2023), per token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megalite.objectives.objective import PairObjective, Scores

if TYPE_CHECKING:
    from torch import Tensor


class IPO(PairObjective):
    """(r_chosen / n_chosen − r_rejected / n_rejected − 1 / (2β))²."""

    needs_reference = True

    def losses(self, chosen: Scores, rejected: Scores) -> Tensor:
        one, other = (each.log_ratio / each.completion_tokens for each in (chosen, rejected))
        return (one - other - 1 / (2 * self.options.beta)).square()
