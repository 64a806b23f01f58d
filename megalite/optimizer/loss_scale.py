"""Dynamic loss scaling for fp16, by DeepSpeed's rules.

Small gradients underflow in fp16: the loss is multiplied by a scale before the backward, and gradients are
divided by it before the update. A step with non-finite gradients (an overflow) is skipped; after `hysteresis`
overflows the scale is halved, down to a minimum. After `loss_scale_window` steps without an overflow it is
doubled. All ranks have the same norm, and therefore the same scale.
"""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.sections.fp16 import FP16Config


@dataclass
class LossScale:
    """The scale, and the counters that determine its next change.

    Attributes:
        value: the scale; 1 where loss scaling is off.
        tolerance: number of overflows until the scale is halved.
        step: number of steps, skipped ones included.
        last_overflow: the step of the last overflow.
    """

    options: FP16Config
    active: bool
    value: float = 1.0
    tolerance: int = 1
    step: int = 0
    last_overflow: int = -1

    def __post_init__(self) -> None:
        if self.active:
            self.value = 2.0**self.options.initial_scale_power
            self.tolerance = self.options.hysteresis

    @property
    def adapts(self) -> bool:
        """Whether non-finite gradients may be due to a scale that is too large."""
        return self.active and self.value > self.options.min_loss_scale

    def update(self, finite: bool) -> None:
        """Update the scale after a step.

        Args:
            finite: whether its gradients were finite.
        """
        if not self.active:
            return
        if not finite:
            self.last_overflow = self.step
            if self.tolerance == 1:
                self.value = max(self.value / 2, self.options.min_loss_scale)
            else:
                self.tolerance -= 1
        elif (self.step - self.last_overflow) % self.options.loss_scale_window == 0:
            self.value *= 2
            self.tolerance = self.options.hysteresis
        self.step += 1

    def state(self) -> dict[str, float | int]:
        """Returns the state for a checkpoint."""
        return {
            "value": self.value,
            "tolerance": self.tolerance,
            "step": self.step,
            "last_overflow": self.last_overflow,
        }

    def load(self, state: dict[str, float | int]) -> None:
        """Continue from a checkpoint's state. The state of a run in another precision, which has counted no
        step, is ignored."""
        if self.active and state["step"] > 0:
            self.value, self.tolerance = float(state["value"]), int(state["tolerance"])
            self.step, self.last_overflow = int(state["step"]), int(state["last_overflow"])
