"""What an instrument of a run implements: called by the training loop, on every rank alike."""

from __future__ import annotations

from typing import Any

from megalite.monitoring.metrics import StepMetrics


class Observer:
    """Watches a run from outside; this one sees nothing. Every rank has the same ones, and calls them alike but for `numbers`."""

    def before(self, step: int) -> None:
        """A step begins."""

    def after(self, step: int) -> None:
        """It has ended on this rank."""

    def numbers(self, metrics: StepMetrics) -> dict[str, Any]:
        """Further keys of a step's line in metrics.jsonl. Rank 0 alone asks, when the step's result is known."""
        return {}

    def finish(self) -> list[str]:
        """The run is over; returns lines that rank 0 prints."""
        return []
