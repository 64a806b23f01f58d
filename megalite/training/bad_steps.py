"""Policy for bad steps: which updates are skipped, and when a run ends or rolls back.

The loss and the gradient norm of a step are bitwise equal on all ranks, so every rank makes the same decision
without communication. A bad step does not change weights or optimizer state. The window of accepted losses is
stored in checkpoints, so a resumed run makes the same decisions as an uninterrupted one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import fsum, inf, isfinite, sqrt
from typing import Any

from megalite.config.sections.faults import FaultsConfig

MAX_ROLLBACKS = 3  # per process; if more are needed, the data is not the cause


class FaultLimit(RuntimeError):
    """Raised after too many consecutive bad steps if the run cannot roll back.

    The message contains the fault and possible remedies.
    """


@dataclass
class BadStepPolicy:
    """Policy that decides which updates are skipped, and whether the run rolls back or ends.

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
        """Return the reason why a step must be skipped, or None if it is accepted.

        Args:
            scale_adapts: whether the loss scale may still be too large. If so, gradients that are not finite
                do not increase `streak`.
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
            return "the gradients are not finite"
        if loss <= self.highest:
            return None
        mean, deviation = self._usual()
        sigma, count = self.options.spike_sigma, len(self.losses)
        return (
            f"loss {loss:.4g} exceeds {mean:.4g} + {sigma:g} * {deviation:.2g} (mean and standard "
            f"deviation of the last {count} steps)"
        )

    @property
    def highest(self) -> float:
        """Return the largest loss that is accepted in the next step."""
        if self.options.spike_sigma is None or len(self.losses) < self.options.spike_window:
            return inf
        mean, deviation = self._usual()
        return mean + self.options.spike_sigma * deviation

    def _usual(self) -> tuple[float, float]:
        """Return the mean and standard deviation of the accepted losses."""
        mean = fsum(self.losses) / len(self.losses)
        return mean, sqrt(fsum((loss - mean) ** 2 for loss in self.losses) / len(self.losses))

    def go_back(self, reason: str, checkpoint: bool) -> None:
        """Count a rollback to a checkpoint.

        Raises:
            FaultLimit: the run must end, because there is no checkpoint, rollbacks are not allowed, or too
                many of them failed.
        """
        if not self.options.rollback:
            way_out = (
                "lower optimizer.lr, or set faults.rollback=true to return to the last "
                "checkpoint and skip these samples"
            )
        elif not checkpoint:
            way_out = (
                "there is no checkpoint to roll back to. Lower optimizer.lr, or save earlier by "
                "setting checkpoint.interval"
            )
        elif self.rollbacks == MAX_ROLLBACKS:
            way_out = (
                f"the run has already been rolled back {MAX_ROLLBACKS} times. Lower optimizer.lr, "
                "or resume from an older checkpoint"
            )
        else:
            self.rollbacks += 1
            return
        raise FaultLimit(f"{reason}. Reached faults.skip_limit={self.options.skip_limit}: {way_out}.")

    def state(self) -> dict[str, Any]:
        """Return the state to store in a checkpoint."""
        return {"losses": list(self.losses), "streak": self.streak}

    def load(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self.streak = state["streak"]
        self.losses = deque(state["losses"], maxlen=self.options.spike_window)
