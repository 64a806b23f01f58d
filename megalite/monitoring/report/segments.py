"""The segments of a run: steps in a row that were done with the same layout, hardware, precision, kernels and
options.

A resume may change all of these. What depends on them (speeds, bubble, peak memory, predictions) is a figure
of a segment, not of the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import Any

from megalite.config.dims import ParallelDims
from megalite.config.errors import ConfigError
from megalite.config.load import from_dict
from megalite.config.schema import Config
from megalite.monitoring.starts import Start
from megalite.parallel.pipeline.bubble import BUBBLES, BubblePlan
from megalite.parallel.pipeline.bubble import plan as planned
from megalite.parallel.pipeline.schedule import Costs
from megalite.planner.report.drawing.measured import MeasuredRun

ELSEWHERE = ("run", "checkpoint", "faults", "validation", "logging", "profiling", "network")
"""Sections that change neither what a step computes nor where."""
HORIZON = frozenset(
    (
        "model.init_from",
        "lora.init_from",
        "train.steps",
        "train.tokens",
        "train.epochs",
        "train.stop_after",
        "train.watchdog",
    )
    + ("train.early_stopping_patience", "train.early_stopping_threshold")
)
"""Options of other sections that only say where a run begins and ends."""


@dataclass(frozen=True)
class RunSegment:
    """Some steps in a row of a run.

    Attributes:
        number: 1 for the first segment.
        start: the start that did them, the last one of several alike; None if it is not recorded.
        first: the first step.
        lines: the lines of these steps in metrics.jsonl, the earliest first.
    """

    number: int
    start: Start | None
    first: int
    lines: Sequence[dict[str, Any]]

    @property
    def last(self) -> int | None:
        """The last step that is done; None if none is."""
        return self.lines[-1]["step"] if self.lines else None

    @property
    def steps(self) -> str:
        """Its steps in words."""
        return (
            f"steps {self.first:,} to {self.last:,}" if self.last is not None else f"from step {self.first:,}"
        )

    @cached_property
    def config(self) -> Config | None:
        """None if it is not recorded, or not readable by this version."""
        try:
            return from_dict(self.start.options) if self.start and self.start.options else None
        except ConfigError:
            return None

    @property
    def has_pipeline(self) -> bool:
        """Whether it has several stages, and so a bubble; also where that is not known."""
        return self.config is None or self.config.parallel.pp > 1

    def values(self, key: str) -> list[float]:
        """The numbers under a key of metrics.jsonl."""
        return [float(line[key]) for line in self.lines if isinstance(line.get(key), int | float)]

    def typical(self, key: str) -> float | None:
        """The median over the second half of the steps, to exclude start-up."""
        values = self.values(key)
        return median(values[len(values) // 2 :]) if values else None

    def highest(self, key: str) -> float | None:
        return max(self.values(key), default=None)

    # ---- what a start may change

    @property
    def layout(self) -> str:
        if self.config is None:
            return "–"
        parallel = self.config.parallel
        schedule = f", {parallel.schedule}" if parallel.pp > 1 else ""
        context = f" × cp {parallel.cp}" if parallel.cp > 1 else ""
        experts = f", ep {parallel.ep}" if parallel.ep > 1 else ""
        return (
            f"tp {parallel.tp} × pp {parallel.pp}{context} × dp {parallel.dp}{experts}, "
            f"ZeRO-{parallel.zero}{schedule}"
        )

    @property
    def device(self) -> str | None:
        return None if self.start is None else self.start.environment.get("device")

    @property
    def ranks(self) -> int | None:
        if self.start is not None and "ranks" in self.start.environment:
            return int(self.start.environment["ranks"])
        return (
            None
            if self.config is None or self.config.parallel.dp is None
            else ParallelDims.of(self.config).world
        )

    @property
    def hardware(self) -> str:
        return " × ".join(str(part) for part in (self.ranks, self.device) if part is not None) or "–"

    @property
    def precision(self) -> str:
        return "–" if self.config is None else f"{self.config.train.precision}, {self.config.train.recompute}"

    @property
    def batch(self) -> str:
        if self.config is None:
            return "–"
        return (
            f"{self.config.train.global_batch_size}, in microbatches of {self.config.train.micro_batch_size}"
        )

    @property
    def kernels(self) -> str:
        return "; ".join(self.start.kernels) if self.start and self.start.kernels else "–"

    # ---- predictions

    @property
    def prediction(self) -> dict[str, Any]:
        """What was predicted at its start: `step_time_s`, `bubble_fraction`."""
        return {} if self.start is None else self.start.prediction

    def is_recorded_by(self, recorded: MeasuredRun) -> bool:
        """Whether a recorded timeline is of its steps, with its layout. Steps that were done again may have
        been recorded before."""
        if (
            self.config is None
            or not recorded.steps
            or not self.first <= recorded.steps[0] <= (self.last or self.first - 1)
        ):
            return False
        parallel, schedule = self.config.parallel, recorded.plan.schedule
        if parallel.dp is None or (parallel.schedule, parallel.pp) != (schedule.name, schedule.ranks):
            return False
        return schedule.microbatches == ParallelDims.of(self.config).microbatches and recorded.layout in (
            None,
            self.sizes(),
        )

    def sizes(self) -> dict[str, int | None]:
        """The ranks along each axis."""
        return (
            {}
            if self.config is None
            else {axis: getattr(self.config.parallel, axis) for axis in ("tp", "pp", "dp", "cp")}
        )

    def schedule(self) -> BubblePlan | None:
        """The pipeline of a step with the durations that its schedule was planned for; None without a
        pipeline."""
        if self.config is None or self.config.parallel.pp == 1 or self.config.parallel.dp is None:
            return None
        parallel = self.config.parallel
        sizes = (parallel.pp, ParallelDims.of(self.config).microbatches, parallel.virtual_stages)
        return planned(parallel.schedule, *sizes, Costs(*parallel.schedule_costs))

    def predicted(self, recorded: MeasuredRun | None = None) -> list[tuple[str, float, float]]:
        """Name, predicted and measured value, where both are known. recorded: a timeline of these steps."""
        predictions: list[tuple[str, float, float]] = []
        if recorded is not None:
            predictions += [
                (name, getattr(recorded.plan.timeline, name), recorded.bubbles[name])
                for name in recorded.bubbles
            ]
        elif (plan := self.schedule()) is not None and (bubble := self.typical(BUBBLES[0])) is not None:
            planned_for = self.prediction.get(BUBBLES[0])
            predictions.append(
                (BUBBLES[0], plan.timeline.bubble_fraction if planned_for is None else planned_for, bubble)
            )
        seconds, measured = self.prediction.get("step_time_s"), self.typical("step_time_s")
        if seconds is not None and measured is not None:
            predictions.append(("step_time_s", seconds, measured))
        return predictions


def segments(starts: Sequence[Start], lines: Sequence[dict[str, Any]]) -> list[RunSegment]:
    """The segments of a run, the earliest first; at least one.

    starts: in their order, the last one with the present configuration; lines: of all steps.
    """
    parts: list[RunSegment] = []
    edges = [start.step for start in starts]
    if lines and lines[0]["step"] <= edges[0]:
        parts.append(
            RunSegment(1, None, lines[0]["step"], [line for line in lines if line["step"] <= edges[0]])
        )
    for start, end in zip(starts, [*edges[1:], None], strict=True):
        own = [line for line in lines if start.step < line["step"] and (end is None or line["step"] <= end)]
        if parts and parts[-1].start is not None and alike(parts[-1].start, start):
            parts[-1] = replace(parts[-1], start=start, lines=[*parts[-1].lines, *own])
        elif own or end is None:
            parts.append(RunSegment(len(parts) + 1, start, start.step + 1, own))
    return parts


def alike(start: Start, other: Start) -> bool:
    """Whether two starts belong to one segment."""
    return (
        not differences([start, other])
        and start.environment == other.environment
        and start.kernels == other.kernels
    )


def differences(starts: Sequence[Start | None]) -> dict[str, list[Any]]:
    """The options with a part in what a step computes, and where, in which starts differ: option → value of
    each."""
    flat = [dict(flattened(start.options)) if start is not None else {} for start in starts]
    names = dict.fromkeys(name for options in flat for name in options)
    counted = [name for name in names if name not in HORIZON and name.partition(".")[0] not in ELSEWHERE]
    known = [options for options in flat if options]
    return {
        name: [options.get(name) for options in flat]
        for name in counted
        if any(options.get(name) != known[0].get(name) for options in known)
    }


def flattened(options: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    """Every option as `section.name` and its value."""
    return (
        (f"{section}.{key}", value)
        for section, values in options.items()
        for key, value in (values or {}).items()
    )
