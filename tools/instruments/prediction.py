"""What was predicted of a run beside what was measured: the last line that it prints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from statistics import fmean, median
from typing import Any

import torch

from megalite.config.schema import Config
from megalite.parallel.pipeline.partition import layer_costs
from megalite.training import build
from megalite.training.fit import Observer
from megalite.training.metrics import StepMetrics
from megalite.training.trainer import Trainer
from tools.planning.simulator import simulate

PredictStep = Callable[[Config, torch.device], float | None]
"""(configuration, device) → seconds of a step; None where that can not be told."""


def stage_costs(config: Config) -> list[float]:
    """The work of each stage beside that of a mean rank, whose stages sum to 1: as measured (parallel.layer_costs), else estimated."""
    layers: Sequence[float]
    if config.parallel.layer_costs is not None:
        embedding, *layers, head = config.parallel.layer_costs
    else:
        layers, embedding, head = layer_costs(config.model, config.data.sequence_length)
    rest, costs = iter(layers), []
    for count in build.partition(config):
        costs.append(sum(islice(rest, count), 0.0))
    costs[0] += embedding
    costs[-1] += head
    mean = sum(costs) / config.parallel.pp
    return [cost / mean for cost in costs]


def predicted_bubble(config: Config) -> float | None:
    """The bubble that the simulator gives the run's own schedule, in the measure that the run uses; None without a pipeline."""
    if config.parallel.pp == 1:
        return None
    costs, plan = stage_costs(config), build.schedule(config, build.microbatch_count(config))
    forward, backward, weight = ([each * cost for cost in costs] for each in config.parallel.schedule_costs[:3])
    timeline = simulate(plan, forward, backward, weight, config.parallel.schedule_costs[3])
    return timeline.bubble_rate if build.ends_in_turn(config) else timeline.bubble_fraction


def describe(times: list[float], bubbles: list[float], predicted_time: float | None, predicted_bubble: float | None) -> list[str]:
    """The line, or none where nothing was predicted. The first step, which warms up, is left out where there are others."""
    parts = []
    if times and predicted_time is not None:
        parts.append(f"step time {predicted_time:.4g} s predicted, {median(times[1:] or times):.4g} s measured (median)")
    if predicted_bubble is not None:
        measured = f"{fmean(bubbles[1:] or bubbles):.1%} measured" if bubbles else "not measured"
        parts.append(f"bubble {predicted_bubble:.1%} predicted, {measured}")
    return ["; ".join(parts)] if parts else []


class Outcome(Observer):
    """Collects what rank 0 measures, and compares it at the end with the simulator's bubble and the step time that `predict` gives."""

    def __init__(self, trainer: Trainer, predict: PredictStep | None = None):
        self.trainer, self.predict = trainer, predict
        self.times: list[float] = []
        self.bubbles: list[float] = []

    def numbers(self, metrics: StepMetrics) -> dict[str, Any]:
        self.times.append(metrics.step_time_s)
        if metrics.bubble_fraction is not None:
            self.bubbles.append(metrics.bubble_fraction)
        return {}

    def finish(self) -> list[str]:
        if not self.times:
            return []
        config = self.trainer.config
        seconds = None if self.predict is None else self.predict(config, self.trainer.device)
        return describe(self.times, self.bubbles, seconds, predicted_bubble(config))
