"""AdEMAMix (Pagliardini et al. 2024, "The AdEMAMix Optimizer: Better, Faster, Older").

AdamW with a second, slow average of the gradient:

    m ← β1 · m + (1 − β1) · g        s ← β3(t) · s + (1 − β3(t)) · g        v ← β2 · v + (1 − β2) · g²
    u ← (m / (1 − β1^t) + α(t) · s) / (√(v / (1 − β2^t)) + eps)
    p ← p · (1 − lr · weight_decay) − lr · u

Over the first T = `ademamix.schedule_steps` steps, α(t) = α · t / T rises linearly, and β3(t) from β1 to β3,
with a half-life of the slow average that rises linearly:

    ln β3(t) = ln β1 · ln β3 / ((1 − t / T) · ln β3 + t / T · ln β1)
"""

from __future__ import annotations

from collections.abc import Mapping
from math import exp, log
from typing import TYPE_CHECKING

from megalite.config.sections.ademamix import AdEMAMixConfig
from megalite.config.sections.optimizer import OptimizerConfig
from megalite.optimizer.update_rule import UpdateRule, UpdateStep

if TYPE_CHECKING:
    from torch import Tensor


class AdEMAMix(UpdateRule):
    """Keeps three moments: those of AdamW, and the slow average."""

    state = ("exp_avg", "exp_avg_slow", "exp_avg_sq")

    def __init__(self, options: OptimizerConfig, slow: AdEMAMixConfig):
        super().__init__(options)
        self.slow = slow

    def schedules(self, age: int) -> tuple[float, float]:
        """Return α and β3 of the update number `age` of the slow average."""
        share = min(age / self.slow.schedule_steps, 1.0) if self.slow.schedule_steps else 1.0
        if share == 1.0 or not self.options.betas[0]:
            return share * self.slow.alpha, self.slow.beta3
        first, last = log(self.options.betas[0]), log(self.slow.beta3)
        beta3 = exp(first * last / ((1 - share) * last + share * first))
        return share * self.slow.alpha, min(beta3, self.slow.beta3)

    def update(self, weights: Tensor, grads: Tensor, state: Mapping[str, Tensor], step: UpdateStep) -> None:
        """As in `UpdateRule`."""
        beta1, beta2 = self.options.betas
        alpha, beta3 = self.schedules(step.ages["exp_avg_slow"])
        fast, slow, square = (state[kind] for kind in self.state)
        fast.lerp_(grads, 1 - beta1)
        slow.lerp_(grads, 1 - beta3)
        square.mul_(beta2).addcmul_(grads, grads, value=1 - beta2)
        root = (square / (1 - beta2 ** step.ages["exp_avg_sq"])).sqrt_().add_(self.options.eps)
        update = (fast / (1 - beta1 ** step.ages["exp_avg"])).add_(slow, alpha=alpha).div_(root)
        weights.mul_(1 - step.lr * step.weight_decay).sub_(update, alpha=step.lr)
