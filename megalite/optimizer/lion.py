"""Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms").

    p ← p · (1 − lr · weight_decay) − lr · sign(β1 · m + (1 − β1) · g)
    m ← β2 · m + (1 − β2) · g

Every update has the size of the learning rate, so that it is a third to a tenth of AdamW's, and weight decay
3 to 10 times AdamW's; the paper has betas of 0.9 and 0.99.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megalite.optimizer.update_rule import UpdateRule, UpdateStep

if TYPE_CHECKING:
    from torch import Tensor


class Lion(UpdateRule):
    """Keeps one moment: half of AdamW's."""

    state = ("exp_avg",)

    def update(self, weights: Tensor, grads: Tensor, state: Mapping[str, Tensor], step: UpdateStep) -> None:
        """As in `UpdateRule`."""
        (beta1, beta2), moment = self.options.betas, state["exp_avg"]
        direction = moment.lerp(grads, 1 - beta1).sign_()
        weights.mul_(1 - step.lr * step.weight_decay).sub_(direction, alpha=step.lr)
        moment.lerp_(grads, 1 - beta2)
