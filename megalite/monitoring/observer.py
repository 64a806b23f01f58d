"""The protocol of a run's instruments, which the training loop calls on every rank."""

from __future__ import annotations

from typing import Any

from megalite.monitoring.metrics import StepMetrics


class Observer:
    """Base class of instruments; does nothing. Every rank has the same observers and calls them alike, except
    `numbers`."""

    def before(self, step: int) -> None:
        """Called before a step."""

    def after(self, step: int) -> None:
        """Called after a step has ended on this rank."""

    def numbers(self, metrics: StepMetrics) -> dict[str, Any]:
        """Further keys of a step's line in metrics.jsonl. Called on rank 0 only, when the step's result is
        known."""
        return {}

    def lines(self, metrics: StepMetrics) -> list[str]:
        """Lines to print below a step's own. Called on rank 0 only, after `numbers`."""
        return []

    def finish(self) -> list[str]:
        """Called at the end of the run; returns lines that rank 0 prints."""
        return []
