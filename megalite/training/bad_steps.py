"""Bad steps: which updates are skipped, and when a run ends or rolls back.

All ranks have the same loss and gradient norm of a step, bit for bit. Each rank therefore decides locally,
without communication, and all decide alike. A bad step leaves weights and optimizer state unchanged. The
window of accepted losses is stored in checkpoints: a resumed run decides as an uninterrupted one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import fsum, inf, isfinite, sqrt
from typing import Any

from megalite.config.sections.faults import FaultsConfig

MAX_ROLLBACKS = 3  # in one process: if a fourth is needed, the data is not the cause


class FaultLimit(RuntimeError):
    """Too many consecutive steps were bad, and the run cannot roll back.

    The message names the fault and possible remedies.
    """


@dataclass
class BadStepPolicy:
    """Decides which updates are skipped, and whether the run rolls back or ends.

    Attributes:
        streak: consecutive steps skipped since the last accepted one.
        rollbacks: number of rollbacks in this process.
        losses: the last `spike_window` accepted losses.
    """

    options: FaultsConfig
    streak: int = 0
    rollbacks: int = 0
    losses: deque[float] = field(init=False)

    def __post_init__(self) -> None:
        self.losses = deque(maxlen=self.options.spike_window)

    def judge(self, loss: float, norm: float, scale_adapts: bool = False) -> str | None:
        """Returns the reason why a step must be skipped; None: it is accepted.

        scale_adapts: the loss scale may still be too large, so gradients that are not finite do not count in
        `streak`.
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
        if loss <= self.highest:
            return None
        mean, deviation = self._usual()
        sigma, count = self.options.spike_sigma, len(self.losses)
        return (
            f"loss {loss:.4g} exceeds {mean:.4g} + {sigma:g} * {deviation:.2g}, mean and deviation of "
            f"{count} steps"
        )

    @property
    def highest(self) -> float:
        """The largest loss that the next step may have."""
        if self.options.spike_sigma is None or len(self.losses) < self.options.spike_window:
            return inf
        mean, deviation = self._usual()
        return mean + self.options.spike_sigma * deviation

    def _usual(self) -> tuple[float, float]:
        """Mean and deviation of the accepted losses."""
        mean = fsum(self.losses) / len(self.losses)
        return mean, sqrt(fsum((loss - mean) ** 2 for loss in self.losses) / len(self.losses))

    def go_back(self, reason: str, checkpoint: bool) -> None:
        """Count a rollback to a checkpoint.

        Raises:
            FaultLimit: the run must end: there is no checkpoint, rollbacks are not allowed, or there were too
                many.
        """
        if not self.options.rollback:
            way_out = (
                "lower optimizer.lr, or set faults.rollback = true to return to the last checkpoint and skip "
                "these samples"
            )
        elif not checkpoint:
            way_out = (
                "there is no checkpoint to return to: lower optimizer.lr, or save one earlier with "
                "checkpoint.interval"
            )
        elif self.rollbacks == MAX_ROLLBACKS:
            way_out = (
                f"{MAX_ROLLBACKS} rollbacks have not helped: lower optimizer.lr, or resume from an older "
                "checkpoint"
            )
        else:
            self.rollbacks += 1
            return
        raise FaultLimit(f"{reason}. faults.skip_limit = {self.options.skip_limit} is reached: {way_out}.")

    def state(self) -> dict[str, Any]:
        """The state as stored in a checkpoint."""
        return {"losses": list(self.losses), "streak": self.streak}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint's state."""
        self.streak = state["streak"]
        self.losses = deque(state["losses"], maxlen=self.options.spike_window)
