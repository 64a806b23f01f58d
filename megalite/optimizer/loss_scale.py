"""Dynamic loss scaling for fp16, by DeepSpeed's rules. Imports no torch.

fp16 has few small numbers: gradients are multiplied by a scale before the backward, and divided by it before the update. Where they are
not finite, the step is skipped; after `hysteresis` such steps the scale is halved, down to a minimum. After a window of steps without one
it is doubled. Every rank sees the same norm, so every rank's scale is the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.schema import FP16Config


@dataclass
class LossScale:
    """The scale, and what decides about its next change. `value` is 1 where nothing is scaled."""

    options: FP16Config
    active: bool
    value: float = 1.0
    tolerance: int = 1  # overflows until the scale is halved
    step: int = 0
    last_overflow: int = -1

    def __post_init__(self) -> None:
        if self.active:
            self.value = 2.0**self.options.initial_scale_power
            self.tolerance = self.options.hysteresis

    @property
    def adapts(self) -> bool:
        """Whether gradients that are not finite may only mean that the scale is too large."""
        return self.active and self.value > self.options.min_loss_scale

    def update(self, finite: bool) -> None:
        """Take note of a step."""
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
        """What a checkpoint keeps."""
        return {"value": self.value, "tolerance": self.tolerance, "step": self.step, "last_overflow": self.last_overflow}

    def load(self, state: dict[str, float | int]) -> None:
        """Continue from a checkpoint's state; one of another precision has counted no step."""
        if self.active and state["step"] > 0:
            self.value, self.tolerance = float(state["value"]), int(state["tolerance"])
            self.step, self.last_overflow = int(state["step"]), int(state["last_overflow"])
