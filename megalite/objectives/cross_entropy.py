"""The default objective: the mean cross-entropy of the next token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megalite.objectives.objective import Objective, Scores

if TYPE_CHECKING:
    from torch import Tensor


class NextToken(Objective):
    """loss = −Σ log p(target) / number of targets.

    The head computes it directly, with weights of messages, label smoothing and z-loss: a sequence has no
    meaning of its own in it.
    """

    data = "tokens"

    def terms(self, scores: Scores) -> list[Tensor]:
        return [-(scores.completion + scores.prompt).sum()]

    def counts(self, scores: Scores) -> list[Tensor]:
        return [(scores.completion_tokens + scores.prompt_tokens).sum()]
