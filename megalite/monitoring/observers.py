"""Observers, the instruments that the training loop calls before and after each step on every rank.

They are listed in `observers`. Two modules are not observers: links.py tests the network before the first
step, and out_of_memory.py suggests changes after an out-of-memory error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from megalite.config.errors import ConfigError
from megalite.config.extensions import EXTENSIONS
from megalite.monitoring.metrics import StepMetrics

if TYPE_CHECKING:
    from megalite.launch.environment import RankEnvironment
    from megalite.planner.api import Device
    from megalite.training.trainer import Trainer

STEPS_KEPT = 4
"""Number of steps whose measurements an observer keeps until `numbers` is called.

Under some schedules results are available one step later, and only rank 0 reads them.
"""


class Observer:
    """Base class of observers, with methods that do nothing.

    Every rank has the same observers and calls the same methods, except `numbers` and `lines`.
    """

    def before(self, step: int) -> None:
        """Called before a step."""

    def after(self, step: int) -> None:
        """Called after a step has ended on this rank."""

    def numbers(self, metrics: StepMetrics) -> dict[str, Any]:
        """Return further keys for the line of a step in metrics.jsonl.

        Called on rank 0 only, when the result of the step is available.
        """
        return {}

    def lines(self, metrics: StepMetrics) -> list[str]:
        """Return lines to print below the line of a step. Called on rank 0 only, after `numbers`."""
        return []

    def finish(self) -> list[str]:
        """Return lines that rank 0 prints at the end of the run."""
        return []


def numbers_of(
    observers: Sequence[Observer], metrics: StepMetrics, known: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the further keys of the line of a step.

    Args:
        known: those that the step itself has given, which are included.

    Raises:
        ConfigError: an observer of the user returns a key that the line has already.
    """
    given = [(observer, observer.numbers(metrics)) for observer in observers]
    numbers, own = dict(known), tuple(EXTENSIONS.observers)
    for observer, values in sorted(given, key=lambda each: isinstance(each[0], own)):
        taken = {*asdict(metrics), *numbers, "val_loss"}
        if isinstance(observer, own) and (twice := sorted(taken & values.keys())):
            raise ConfigError(
                f"{type(observer).__name__}.numbers of run.extensions returns {', '.join(twice)}, which "
                "metrics.jsonl already has. Use another name."
            )
        numbers |= values
    return numbers


def observers(
    trainer: Trainer, own: RankEnvironment, device: Device | None = None, kernels: Sequence[str] = ()
) -> Sequence[Observer]:
    """Return all observers of a run, the same on every rank.

    Args:
        own: this rank's environment.
        device: the planner's description of the device.
        kernels: descriptions of the selected implementations.
    """
    # not at the top, because each of these modules imports this one
    from megalite.monitoring.epochs import Epochs
    from megalite.monitoring.gpu import GpuSensors
    from megalite.monitoring.phases import PhaseTimes
    from megalite.monitoring.prediction import Outcome
    from megalite.monitoring.rank_times import ContextImbalance, RankTimes
    from megalite.monitoring.timeline_recorder import TimelineRecorder
    from megalite.monitoring.tracing import MemorySnapshot, Tracer

    config, phases = trainer.config, PhaseTimes(trainer)
    chosen: list[Observer] = [Epochs(trainer)]
    if config.logging.loss_by_source:
        from megalite.monitoring.loss_by_source import LossBySource

        chosen.append(LossBySource(trainer))
    if config.logging.fp8_interval is not None:
        from megalite.monitoring.fp8_statistics import Fp8Statistics

        chosen.append(Fp8Statistics(trainer))
    if config.faults.recheck is not None:
        from megalite.monitoring.rechecks import Rechecks

        chosen.append(Rechecks(trainer))
    chosen += [phases, RankTimes(trainer, phases)]
    if config.parallel.cp > 1:
        chosen.append(ContextImbalance(trainer))
    chosen += [GpuSensors(trainer), TimelineRecorder(trainer), Tracer(trainer), MemorySnapshot(trainer)]
    chosen += [kind(trainer) for kind in EXTENSIONS.observers]
    return [*chosen, Outcome(trainer, own, device, kernels)]
