"""AdamW (Loshchilov and Hutter 2019) over the owned ranges of flat buckets.

Each bucket consists of at most two ranges, one with weight decay and one without, and of few more with
`model.mup`, so a step is a few fused calls for any number of tensors. Ranges start and end on multiples of 32
elements: the place where a shard is cut changes no rounding. No communication.
"""

from __future__ import annotations

from megalite_kernels.adamw import adamw_
from torch import Tensor

from megalite.config.sections.optimizer import OptimizerConfig
from megalite.optimizer.registry import ADAMW
from megalite.optimizer.state import OptimizerState


class AdamW:
    """Updates all spans that have AdamW's two moments."""

    def __init__(self, state: OptimizerState, options: OptimizerConfig):
        self.state, self.options = state, options
        self._ranges = [span.range(ADAMW) for span in state.spans(*ADAMW)]

    def step(self, step: int, lr: float, divisor: Tensor | None) -> None:
        """As in `registry.Optimizer`."""
        options, memory = self.options, self.state.store.state
        plain = step, lr, options.weight_decay
        # after a change of the optimizer, one moment is younger than the other
        step, lr, decay = self.state.corrected(*plain, options.betas) if self.state.started else plain
        # stays on the device: the host does not wait for it
        scale = None if divisor is None else divisor.to(memory.device, non_blocking=True)
        # under offload a window at a time, whose copies overlap with updates
        for window in memory.windows(self._ranges):
            factor = window[0].lr_factor
            adamw_(
                [span.master for span in window],
                [span.grads for span in window],
                [span.state[0] for span in window],
                [span.state[1] for span in window],
                # written in compute precision; else the masters are the weights
                [span.weights for span in window if span.separate],
                step=step,
                lr=lr * factor,
                beta1=options.betas[0],
                beta2=options.betas[1],
                eps=options.eps,
                # lr · weight_decay is the same for all
                weight_decay=decay / factor if window[0].decays else 0.0,
                grad_scale=scale,
            )
