"""Bad steps: which updates are thrown away, and when a run gives up or goes back.

A step's loss and gradient norm are known to all ranks as the same bits, so each rank judges by itself, all alike, and nothing more travels.
A bad step leaves weights and optimizer as they were. The window of accepted losses is part of a checkpoint: a resumed run judges as the one
that never stopped.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import fsum, isfinite, sqrt
from typing import Any

from megalite.config.schema import FaultsConfig

MAX_ROLLBACKS = 3  # in one process: what goes wrong a fourth time is not the data


class FaultLimit(RuntimeError):
    """So many steps in a row were bad that going on is of no use; the message says what was wrong and what may help."""


@dataclass
class Guard:
    """The judge of steps. `streak` is how many were skipped since the last accepted one."""

    options: FaultsConfig
    streak: int = 0
    rollbacks: int = 0
    losses: deque[float] = field(init=False)

    def __post_init__(self) -> None:
        self.losses = deque(maxlen=self.options.spike_window)

    def judge(self, loss: float, norm: float, scale_adapts: bool = False) -> str | None:
        """Why a step must be skipped; None accepts it.

        `scale_adapts`: gradients that are not finite only mean that the loss scale is too large yet.
        """
        fault = self._fault(loss, norm)
        if fault is None:
            self.losses.append(loss)
            self.streak = 0
        elif not (scale_adapts and isfinite(loss) and not isfinite(norm)):
            self.streak += 1
        return fault

    def _fault(self, loss: float, norm: float) -> str | None:
        if not isfinite(loss):
            return "the loss is not finite"
        if not isfinite(norm):
            return "gradients are not finite"
        sigma, count = self.options.spike_sigma, len(self.losses)
        if sigma is None or count < self.options.spike_window:
            return None
        mean = fsum(self.losses) / count
        deviation = sqrt(fsum((each - mean) ** 2 for each in self.losses) / count)
        if loss <= mean + sigma * deviation:
            return None
        return f"loss {loss:.4g} exceeds {mean:.4g} + {sigma:g} * {deviation:.2g}, mean and deviation of {count} steps"

    def go_back(self, reason: str, checkpoint: bool) -> None:
        """Take note that the run returns to a checkpoint. Raises FaultLimit where it must end instead: there is none, or it may not."""
        if not self.options.rollback:
            way_out = "lower optimizer.lr, or let faults.rollback = true return to the last checkpoint and leave these samples out"
        elif not checkpoint:
            way_out = "there is no checkpoint to return to: lower optimizer.lr, or save one earlier with checkpoint.interval"
        elif self.rollbacks == MAX_ROLLBACKS:
            way_out = f"{MAX_ROLLBACKS} returns to a checkpoint have not helped: lower optimizer.lr, or resume from an older checkpoint"
        else:
            self.rollbacks += 1
            return
        raise FaultLimit(f"{reason}. faults.skip_limit = {self.options.skip_limit} is reached: {way_out}.")

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"losses": list(self.losses), "streak": self.streak}

    def load(self, state: dict[str, Any]) -> None:
        self.streak = state["streak"]
        self.losses = deque(state["losses"], maxlen=self.options.spike_window)
