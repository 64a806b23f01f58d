"""Dynamic loss scaling for fp16, by DeepSpeed's rules.

Small gradients underflow in fp16: the loss is multiplied by a scale before the backward, and gradients are
divided by it before the update. A step with gradients that are not finite is skipped; after `hysteresis` such
steps the scale is halved, down to a minimum. After `loss_scale_window` steps without one it is doubled. All
ranks see the same norm, so the scale is the same on all.
"""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.schema import FP16Config


@dataclass
class LossScale:
    """The scale, and the counters that determine its next change. `value` is 1 where loss scaling is off."""

    options: FP16Config
    active: bool
    value: float = 1.0
    tolerance: int = 1  # overflows until the scale is halved
    step: int = 0  # steps counted, skipped ones included
    last_overflow: int = -1  # the step of the last overflow

    def __post_init__(self) -> None:
        if self.active:
            self.value = 2.0**self.options.initial_scale_power
            self.tolerance = self.options.hysteresis

    @property
    def adapts(self) -> bool:
        """Whether gradients that are not finite may be due to a scale that is too large."""
        return self.active and self.value > self.options.min_loss_scale

    def update(self, finite: bool) -> None:
        """Count a step; `finite`: whether its gradients were."""
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
        """The state as stored in a checkpoint."""
        return {
            "value": self.value,
            "tolerance": self.tolerance,
            "step": self.step,
            "last_overflow": self.last_overflow,
        }

    def load(self, state: dict[str, float | int]) -> None:
        """Continue from a checkpoint's state; that of a run in another precision has counted no step and is
        ignored."""
        if self.active and state["step"] > 0:
            self.value, self.tolerance = float(state["value"]), int(state["tolerance"])
            self.step, self.last_overflow = int(state["step"]), int(state["last_overflow"])
