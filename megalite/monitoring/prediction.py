"""Predicted and measured step time and bubble of a run, which are printed in its last line."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from megalite.assembly import parts as build
from megalite.config import run_files
from megalite.config.load import to_dict
from megalite.config.schema import Config
from megalite.launch.environment import ALIKE, EQUAL, RankEnvironment
from megalite.monitoring import starts
from megalite.monitoring.metrics import StepMetrics
from megalite.monitoring.observers import Observer
from megalite.monitoring.size_changes import change_of
from megalite.parallel.pipeline.simulator import simulate
from megalite.planner.api import Device, prediction_interval, step_seconds, sum_by_stage, unit_flops
from megalite.system.files import write_synced
from megalite.system.messages import write_or_say

if TYPE_CHECKING:
    from megalite.training.trainer import Trainer


def stage_costs(config: Config) -> list[float]:
    """Return the work of each stage relative to the mean over ranks, which sums to pp.

    It is measured (parallel.layer_costs) or otherwise estimated.
    """
    costs = sum_by_stage(config, config.parallel.layer_costs or unit_flops(config))
    mean = sum(costs) / config.parallel.pp
    return [cost / mean for cost in costs]


def predicted_bubble(config: Config) -> float | None:
    """Return the simulated bubble of the schedule, or None without a pipeline.

    The measure is the one that the run uses.
    """
    if config.parallel.pp == 1:
        return None
    costs, plan = stage_costs(config), build.schedule(config, build.layout(config).microbatches)
    forward, backward, weight = (
        [each * cost for cost in costs] for each in config.parallel.schedule_costs[:3]
    )
    timeline = simulate(plan, forward, backward, weight, config.parallel.schedule_costs[3])
    return timeline.bubble_rate if build.staggered_end(config) else timeline.bubble_fraction


def describe(
    times: list[float],
    bubbles: list[float],
    predicted_time: float | None,
    predicted_bubble: float | None,
    device: Device | None = None,
) -> list[str]:
    """Compare predicted and measured values in one line, or return no line without a prediction.

    The first step is a warm-up and excluded if there are others.

    Args:
        device: the device for which the time was predicted.
    """
    parts = []
    if times and predicted_time is not None:
        sure = ""
        if device is not None:
            low, high = prediction_interval(predicted_time)
            sure = f" for {device.name}" + (
                f" ({low:.4g} to {high:.4g} s in 80 % of published runs)" if device.compared else ""
            )
        step_time = median(times[1:] or times)
        parts.append(
            f"step time {predicted_time:.4g} s predicted{sure}, {step_time:.4g} s measured (median), "
            f"{step_time / predicted_time - 1:+.1%}"
        )
    if predicted_bubble is not None:
        measured = f"{fmean(bubbles[1:] or bubbles):.1%} measured" if bubbles else "not measured"
        parts.append(f"bubble {predicted_bubble:.1%} predicted, {measured}")
    return ["; ".join(parts)] if parts else []


def predictions(config: Config, device: Device | None) -> dict[str, Any]:
    """Predict step time (in seconds), its interval and the bubble. Values that cannot be predicted are None.

    Args:
        device: the planner's description of the device; None if unknown.
    """
    seconds = None if device is None else step_seconds(config, device)
    sure = (
        list(prediction_interval(seconds))
        if seconds is not None and device is not None and device.compared
        else None
    )
    return {"step_time_s": seconds, "step_time_interval_s": sure, "bubble_fraction": predicted_bubble(config)}


class Outcome(Observer):
    """Observer that records the start of a run, and compares predictions with measurements at its end.

    The measurements of rank 0 are compared with the bubble of the simulator and the step time of the planner.
    environment.json and a line of starts.jsonl are written at the start, prediction.json at the end.

    Args:
        own: this rank's environment.
        device: the planner's description of the device; None if unknown.
        kernels: descriptions of the selected implementations.
    """

    def __init__(
        self,
        trainer: Trainer,
        own: RankEnvironment,
        device: Device | None = None,
        kernels: Sequence[str] = (),
    ):
        self.trainer, self.device = trainer, device
        self.times: list[float] = []
        self.bubbles: list[float] = []
        self.predicted: dict[str, Any] = {}
        if trainer.mesh.rank == 0:
            environment = {
                "ranks": trainer.mesh.world.size,
                "python": platform.python_version(),
                "cores": os.cpu_count(),
            }
            environment |= {name: own[name] for name in (*EQUAL, *ALIKE) if own.get(name) is not None}
            self._keep(run_files.ENVIRONMENT, environment)
            self.predicted = predictions(trainer.config, device)
            start = starts.Start(
                trainer.step_done,
                to_dict(trainer.config),
                environment,
                list(kernels),
                self.predicted,
                change_of(trainer),
            )
            starts.add(trainer.run_dir, start)

    def numbers(self, metrics: StepMetrics) -> dict[str, Any]:
        self.times.append(metrics.step_time_s)
        if metrics.bubble_fraction is not None:
            self.bubbles.append(metrics.bubble_fraction)
        return {}

    def finish(self) -> list[str]:
        if not self.times:
            return []
        self._keep(
            run_files.PREDICTION,
            {**self.predicted, "measured_step_time_s": median(self.times[1:] or self.times)},
        )
        return describe(
            self.times,
            self.bubbles,
            self.predicted["step_time_s"],
            self.predicted["bubble_fraction"],
            self.device,
        )

    def _keep(self, name: str, content: dict[str, Any]) -> None:
        write_or_say(
            self.trainer.run_dir / name, lambda path: write_synced(path, json.dumps(content, indent=2) + "\n")
        )
