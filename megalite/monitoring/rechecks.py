"""Wrong values that `faults.recheck` has found, in metrics.jsonl."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megalite.monitoring.metrics import StepMetrics
from megalite.monitoring.observers import Observer
from megalite.parallel.recheck.runtime import RecheckedRuntime

if TYPE_CHECKING:
    from megalite.training.trainer import Trainer


class Rechecks(Observer):
    """Observer that adds the ranks with wrong values to a step, as `corrupt_ranks`."""

    def __init__(self, trainer: Trainer):
        runtime = trainer.parts.runtime
        assert isinstance(runtime, RecheckedRuntime)
        self._runtime = runtime

    def numbers(self, metrics: StepMetrics) -> dict[str, Any]:
        known = self._runtime.corruptions
        # under optimistic steps the next step may already have one
        self._runtime.corruptions = [each for each in known if each.step > metrics.step]
        own = [each for each in known if each.step == metrics.step]
        return {"corrupt_ranks": list(own[0].ranks)} if own else {}
