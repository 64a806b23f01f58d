"""What an elementwise optimizer is: the update of elements from their gradients and their state.

An optimizer is one class, in one file. It says which numbers it keeps of each element and how a step changes
them and the weight, as methods of tensors. `elementwise` does the rest for every layout: shards, offload,
clipping and skipped steps, master weights, the precision of `optimizer.moments`, memory and checkpoints.
Imports no torch, so that a configuration is checked without it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from megalite.config.sections.optimizer import OptimizerConfig

if TYPE_CHECKING:
    from torch import Tensor


class UpdateStep(NamedTuple):
    """A step of the optimizer, for elements that have the same rate and weight decay.

    Attributes:
        number: 1-based; skipped steps are not counted.
        lr: learning rate of this step.
        weight_decay: 0 for norms and biases.
        ages: kind of state → number of updates since it was zero, this one included. It is `number`, unless
            the run has changed its optimizer.
    """

    number: int
    lr: float
    weight_decay: float
    ages: Mapping[str, int]


class UpdateRule(ABC):
    """The update of an elementwise optimizer.

    Attributes:
        state: names of the numbers that are kept of each element, zero at the start. A checkpoint has
            NAME/TENSOR. Those with the name of another optimizer's (exp_avg) carry over if a run changes its
            optimizer. A name that ends in _sq is of numbers that are never negative.
        options: the section optimizer.
    """

    state: ClassVar[tuple[str, ...]]

    def __init__(self, options: OptimizerConfig, *sections: Any):
        self.options = options

    @abstractmethod
    def update(self, weights: Tensor, grads: Tensor, state: Mapping[str, Tensor], step: UpdateStep) -> None:
        """Update weights and state in place.

        Args:
            weights: [elements], at least fp32.
            grads: [elements], clipped, in the same dtype. Must not be changed: a step may be repeated.
            state: kind → [elements], in the same dtype.
        """
