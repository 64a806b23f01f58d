"""Time of each step by phase.

A rank notifies its listeners when it begins another activity: an action of its pipeline, reading its batch,
waiting for a message. A clock marks each of these moments, and the time between two marks belongs to the
activity that began at the first one. The phases of a step therefore add up to its duration.

On a CPU a mark is a reading of the host's clock. On a GPU it is an event in the stream, which is read after
the stream has passed it. The events of an update are only passed after the next step has begun, and are
counted there. Reading them never synchronizes the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from megalite.monitoring.metrics import StepMetrics
from megalite.monitoring.observers import STEPS_KEPT, Observer
from megalite.parallel.pipeline.schedule import Action, ActionKind
from megalite.system.activity import BETWEEN, READING, REDUCING, REPORTING, UPDATING
from megalite.system.clock import DeviceClock, HostClock

if TYPE_CHECKING:
    from megalite.training.trainer import Trainer

PHASES = ("data", "forward", "backward", "pipeline", "communication", "optimizer")
WORKING = ("data", "forward", "backward", "optimizer")
"""Phases in which a rank does not wait for another."""
_OF_KIND = {ActionKind.FORWARD: "forward", ActionKind.BACKWARD: "backward", ActionKind.WEIGHT: "backward"}
_OF_WORDS = {
    READING: "data",
    REDUCING: "communication",
    UPDATING: "optimizer",
    BETWEEN: None,
    REPORTING: None,
}

Lap = tuple[Any, Any]
"""An activity, and the mark of the clock when it began."""


def phase_of(place: Any) -> str | None:
    """Return the phase of an activity, or None if it is not part of a step.

    `pipeline` is the time spent waiting for another stage, that is, the bubble on this rank. `communication`
    covers all other waits, sends, and the data-parallel reduction of gradients.
    """
    if isinstance(place, Action):
        return _OF_KIND.get(place.kind, "communication")
    if place in _OF_WORDS:
        return _OF_WORDS[place]
    return "pipeline" if str(place).startswith("pipeline message") else "communication"


def add_up(laps: Sequence[Lap], clock: HostClock) -> dict[str, float]:
    """Return the seconds per phase. The last lap only ends the previous one."""
    seconds = dict.fromkeys(PHASES, 0.0)
    for (place, start), (_, end) in pairwise(laps):
        phase = phase_of(place)
        if phase is not None:
            seconds[phase] += clock.seconds(start, end)
    return seconds


class PhaseTimes(Observer):
    """Observer that measures the phases of this rank's steps.

    On a CPU it measures every step, on a GPU, where an event takes microseconds, only those of
    `logging.interval`.
    """

    def __init__(self, trainer: Trainer, clock: HostClock | None = None):
        gpu = trainer.device.type == "cuda"
        self.activity, self.clock = trainer.mesh.activity, clock or (DeviceClock() if gpu else HostClock())
        self.interval = trainer.config.logging.interval if gpu else 1
        self.laps: list[Lap] = []
        self.of_step: dict[int, dict[str, float]] = {}

    def __call__(self, place: Any) -> None:
        self.laps.append((place, self.clock.mark()))

    def before(self, step: int) -> None:
        if step % self.interval == 0:
            self.activity.listeners += (self,)

    def after(self, step: int) -> None:
        if self not in self.activity.listeners:
            return
        self(BETWEEN)
        self.activity.listeners = tuple(
            listener for listener in self.activity.listeners if listener is not self
        )
        passed = len(self.laps)
        while passed and not self.clock.has_passed(self.laps[passed - 1][1]):
            passed -= 1
        self.of_step[step] = add_up(self.laps[:passed], self.clock)
        self.laps = self.laps[max(passed - 1, 0) :]
        self.of_step.pop(step - STEPS_KEPT * self.interval, None)

    def working(self, step: int) -> float:
        """Return the seconds of a step in which this rank did not wait for another."""
        seconds = self.of_step[step]
        return sum(seconds[phase] for phase in WORKING)

    def numbers(self, metrics: StepMetrics) -> dict[str, Any]:
        return {f"time_{phase}_s": seconds for phase, seconds in self.of_step.pop(metrics.step, {}).items()}
