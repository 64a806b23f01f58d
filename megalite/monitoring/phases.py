"""Where each step's time goes, by phase.

A rank tells its listeners whenever it begins something else: an action of its pipeline, the reading of its batch, the wait for a message.
Each of these moments is marked by a clock, and the time from one mark to the next belongs to what began there. So the phases of a step
add up to the step.

On a CPU a mark is a reading of the host's clock. On a GPU it is an event in the stream, read when the stream has passed it: those of a
step's update are passed only after the next step has begun, and count there. Nothing is ever waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from megalite.activity import BETWEEN, READING, REDUCING, UPDATING
from megalite.clock import DeviceClock, HostClock
from megalite.monitoring.metrics import StepMetrics
from megalite.monitoring.observer import Observer
from megalite.parallel.pipeline.schedule import Action, Kind

if TYPE_CHECKING:
    from megalite.training.trainer import Trainer

PHASES = ("data", "forward", "backward", "pipeline", "communication", "optimizer")
WORKING = ("data", "forward", "backward", "optimizer")
"""The phases in which a rank waits for no other."""
_OF_KIND = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.WEIGHT: "backward"}
_OF_WORDS = {READING: "data", REDUCING: "communication", UPDATING: "optimizer", BETWEEN: None}
_KEPT = 4  # steps whose phases wait to be asked for: results come a step late under some schedules, and on rank 0 alone

Lap = tuple[Any, Any]
"""What a rank began, and the mark of that moment."""


def phase_of(place: Any) -> str | None:
    """The phase to which what a rank does belongs; None for what is no part of a step.

    `pipeline` is the wait for another stage, which is the bubble as one rank sees it; `communication` every other wait, what is done to
    send, and the adding up of what arrives over data parallelism.
    """
    if isinstance(place, Action):
        return _OF_KIND.get(place.kind, "communication")
    if place in _OF_WORDS:
        return _OF_WORDS[place]
    return "pipeline" if str(place).startswith("pipeline message") else "communication"


def add_up(laps: Sequence[Lap], clock: HostClock) -> dict[str, float]:
    """Seconds of each phase. The last lap only ends the one before it."""
    seconds = dict.fromkeys(PHASES, 0.0)
    for (place, start), (_, end) in pairwise(laps):
        phase = phase_of(place)
        if phase is not None:
            seconds[phase] += clock.seconds(start, end)
    return seconds


class PhaseTimes(Observer):
    """Times this rank's steps: every one on a CPU, on a GPU, where an event costs some microseconds, those of `logging.interval`."""

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
        self.activity.listeners = tuple(each for each in self.activity.listeners if each is not self)
        passed = len(self.laps)
        while passed and not self.clock.has_passed(self.laps[passed - 1][1]):
            passed -= 1
        self.of_step[step] = add_up(self.laps[:passed], self.clock)
        self.laps = self.laps[max(passed - 1, 0) :]
        self.of_step.pop(step - _KEPT * self.interval, None)

    def working(self, step: int) -> float:
        """Seconds of a step in which this rank waited for no other."""
        seconds = self.of_step[step]
        return sum(seconds[phase] for phase in WORKING)

    def numbers(self, metrics: StepMetrics) -> dict[str, Any]:
        return {f"time_{phase}_s": seconds for phase, seconds in self.of_step.pop(metrics.step, {}).items()}
