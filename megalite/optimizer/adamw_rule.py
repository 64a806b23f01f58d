"""AdamW for moments in any precision: its update of elements, for those that are not in fp32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megalite_kernels.adamw import adamw_
from torch import Tensor

from megalite.config.sections.optimizer import OptimizerConfig
from megalite.optimizer.adamw import AdamW
from megalite.optimizer.registry import Optimizer
from megalite.optimizer.state import OptimizerState
from megalite.optimizer.update_rule import UpdateRule, UpdateStep


def with_ages(
    betas: Sequence[float], ages: Mapping[str, int], lr: float, weight_decay: float
) -> tuple[int, float, float]:
    """Return the step, learning rate and weight decay for which AdamW corrects the bias of both moments.

    Their ages differ after a change of the optimizer; the kernel has one step, the second moment's.
    """
    first, second = ages["exp_avg"], ages["exp_avg_sq"]
    factor = 1.0 if first == second else (1 - betas[0] ** second) / (1 - betas[0] ** first)
    return second, lr * factor, weight_decay / factor


class AdamWRule(UpdateRule):
    """Calls the kernel of moments in fp32."""

    state = ("exp_avg", "exp_avg_sq")

    def update(self, weights: Tensor, grads: Tensor, state: Mapping[str, Tensor], step: UpdateStep) -> None:
        """As in `UpdateRule`."""
        number, lr, decay = with_ages(self.options.betas, step.ages, step.lr, step.weight_decay)
        adamw_(
            [weights],
            [grads],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            step=number,
            lr=lr,
            beta1=self.options.betas[0],
            beta2=self.options.betas[1],
            eps=self.options.eps,
            weight_decay=decay,
        )


def adamw(state: OptimizerState, options: OptimizerConfig) -> Optimizer:
    """Return AdamW for moments in any precision. Fused calls update those in fp32."""
    if options.moments == "fp32":
        return AdamW(state, options)
    from megalite.optimizer.elementwise import ElementwiseOptimizer

    return ElementwiseOptimizer(state, AdamWRule(options))
