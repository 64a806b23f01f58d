"""The list of a run's instruments, which the command `train` passes to the training loop as observers.

epochs.py counts tokens and epochs, loss_by_source.py tells the losses of a blend's members, phases.py times
each step by phase, rank_times.py compares the ranks, context_imbalance.py predicts how unequal context
parallelism makes them, gpu.py reads the device's memory and sensors, timeline_recorder.py and timeline.py
record and compare the pipeline's timeline, tracing.py runs torch's profiler, prediction.py reports at the end
the prediction's error. Not observers: links.py tests the network before the first step, out_of_memory.py
suggests changes when memory runs out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megalite.config.schema import ConfigError
from megalite.launch.environment import RankEnvironment
from megalite.monitoring.epochs import Epochs
from megalite.monitoring.gpu import GpuSensors
from megalite.monitoring.observer import Observer
from megalite.monitoring.phases import PhaseTimes
from megalite.monitoring.prediction import Outcome
from megalite.monitoring.rank_times import RankTimes
from megalite.monitoring.timeline import compare, describe, written
from megalite.monitoring.timeline_recorder import TimelineRecorder
from megalite.monitoring.tracing import MemorySnapshot, Tracer
from megalite.planner.hardware.devices import Device

if TYPE_CHECKING:
    from megalite.training.trainer import Trainer


class ComparedTimeline(TimelineRecorder):
    """Reports at the end the simulator's prediction for the recorded steps."""

    def finish(self) -> list[str]:
        lines, run = super().finish(), self.trainer.run_dir
        try:
            return [*lines, *describe(compare(run)), written(run)] if self.summary else lines
        except (
            ConfigError,
            OSError,
        ) as error:  # the disk is full, or the directory gone: the run itself is done
            return [*lines, f"no comparison with the simulator: {error}"]


def observers(
    trainer: Trainer, own: RankEnvironment, device: Device | None = None, kernels: Sequence[str] = ()
) -> Sequence[Observer]:
    """All instruments of a run, the same on every rank.

    own: this rank's environment; device: the planner's description of its device; kernels: the chosen
    implementations, in words.
    """
    phases = PhaseTimes(trainer)
    ranks = RankTimes(trainer, phases)
    context: list[Observer] = []
    if trainer.config.parallel.cp > 1:
        from megalite.monitoring.context_imbalance import ContextImbalance

        context.append(ContextImbalance(trainer))
    recorders = ComparedTimeline(trainer), Tracer(trainer), MemorySnapshot(trainer)
    outcome = Outcome(trainer, own, device, kernels)
    return (
        Epochs(trainer),
        *_by_source(trainer),
        phases,
        ranks,
        *context,
        GpuSensors(trainer),
        *recorders,
        outcome,
    )


def _by_source(trainer: Trainer) -> Sequence[Observer]:
    if not trainer.config.logging.loss_by_source:
        return ()
    from megalite.monitoring.loss_by_source import LossBySource  # which other runs do not need

    return (LossBySource(trainer),)
