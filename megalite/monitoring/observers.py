"""The instruments of a run: what watches it without being part of it. The command `train` hands them to the training loop as observers.

phases.py times each step by phase, ranks.py compares the ranks, gpu.py reads the device's memory and sensors, tracing.py runs torch's
profiler, prediction.py says at the end how far the plan was off. environment.py and links.py look at machines and network before the first
step, memory.py says what may help where memory has run out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megalite.launch.environment import RankEnvironment
from megalite.monitoring.gpu import Gpu
from megalite.monitoring.observer import Observer
from megalite.monitoring.phases import PhaseTimes
from megalite.monitoring.prediction import Outcome
from megalite.monitoring.rank_times import RankTimes
from megalite.monitoring.timeline import compare
from megalite.monitoring.timeline_recorder import TimelineRecorder
from megalite.monitoring.tracing import MemorySnapshot, Tracer
from megalite.planning.hardware import Device

if TYPE_CHECKING:
    from megalite.training.trainer import Trainer


class ComparedTimeline(TimelineRecorder):
    """Says at the end what the simulator expects of the steps that were recorded."""

    def finish(self) -> list[str]:
        lines = super().finish()
        return [*lines, *(compare(self.trainer.run_dir) if self.summary else ())]


def observers(trainer: Trainer, own: RankEnvironment, device: Device | None = None) -> Sequence[Observer]:
    """All instruments of a run, on every rank alike. own: what this rank says of itself; device: what the planner knows of its device."""
    phases = PhaseTimes(trainer)
    ranks = RankTimes(trainer, phases)
    return phases, ranks, Gpu(trainer), ComparedTimeline(trainer), Tracer(trainer), MemorySnapshot(trainer), Outcome(trainer, own, device)
