"""The durations that a run measured, and its schedule simulated with them: the time that the run should have
taken."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megalite.config import run_files
from megalite.parallel.pipeline.bubble import BUBBLES, BubblePlan, compare
from megalite.parallel.pipeline.generator import build
from megalite.parallel.pipeline.schedule import Costs, ScheduleError
from megalite.parallel.pipeline.simulator import simulate
from megalite.planner.drawing.tables import percent
from megalite.system.text import aligned

LONGEST = 1e9  # seconds
PASSES = ("forward", "input_backward", "weight_backward")


@dataclass(frozen=True)
class MeasuredRun:
    """A run's schedule, simulated with its measured durations (seconds), and its measured bubbles by name.

    Attributes:
        steps: those that were recorded.
        layout: the ranks along each axis, None in files of earlier versions.
    """

    plan: BubblePlan
    steps: list[int]
    bubbles: dict[str, float]
    layout: dict[str, int] | None = None

    def beside(self) -> str:
        """Return measured and predicted values side by side."""
        rows = [
            (name, percent(value), percent(getattr(self.plan.timeline, name)))
            for name, value in self.bubbles.items()
        ]
        return "\n".join(aligned([(f"over {len(self.steps)} steps", "measured", "predicted"), *rows], left=1))

    def compare(self) -> list[BubblePlan]:
        """Return the plan of every schedule with the mean of these durations over ranks.

        If the run computed both gradients in one backward, each counts for half of it.
        """
        schedule = self.plan.schedule
        forward, backward, weight = (sum(self.plan.durations[name]) / schedule.ranks for name in PASSES)
        if not self.plan.splits:
            backward = weight = (backward + weight) / 2
        costs = Costs(forward, backward, weight, self.plan.durations["comm"])
        chunks = self.plan.chunks if schedule.name == "interleaved" else None
        return [
            replace(plan, unit=self.plan.unit)
            for plan in compare(schedule.ranks, schedule.microbatches, chunks, costs)
        ]


def read(run: Path) -> MeasuredRun:
    """Read a run's traces/timeline.json.

    Raises:
        ScheduleError: the file is missing or broken, or contradicts itself.
    """
    path = run / run_files.TIMELINE
    try:
        recorded = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(recorded, dict):
            raise ValueError("not a JSON object")
        costs = (
            Costs(*map(float, recorded["schedule_costs"]))
            if "schedule_costs" in recorded
            else _planned_for(run)
        )
        schedule = build(
            recorded["schedule"], recorded["pp"], recorded["microbatches"], recorded["virtual_stages"], costs
        )
        passes = {name: _per_stage(recorded["durations"], name, schedule.stages) for name in PASSES}
        comm = _seconds(recorded["comm"])
        forward, input_backward, weight_backward = passes.values()
        timeline = simulate(schedule, forward, input_backward, weight_backward, comm)
        bubbles = {
            name: float(recorded["measured"][name]) for name in BUBBLES if name in recorded["measured"]
        }
        plan = BubblePlan(schedule, timeline, {**passes, "comm": comm}, "s")
        measured = MeasuredRun(plan, list(recorded["steps"]), bubbles, recorded.get("layout"))
        if not timeline.ideal > 0:
            raise ValueError("all durations are 0")
    except OSError as error:
        raise ScheduleError(
            f"Could not read {path}: {error.strerror}. A run writes it if profiling.timeline is set."
        ) from None
    except KeyError as error:
        raise ScheduleError(f"{path} is not a run's timeline: missing key {error}.") from None
    except (TypeError, ValueError) as error:
        raise ScheduleError(f"{path} is not a run's timeline: {str(error).rstrip('.')}.") from None
    return measured


def _planned_for(run: Path) -> Costs | None:
    """Return the costs that the run's schedule was built for, from its configuration.

    Timelines of earlier versions do not contain them.
    """
    import yaml

    path = run / run_files.CONFIG
    if not path.is_file():
        return None
    try:
        costs = yaml.safe_load(path.read_text(encoding="utf-8"))["parallel"]["schedule_costs"]
    except (yaml.YAMLError, TypeError, KeyError):
        raise ScheduleError(
            f"{path} has no parallel.schedule_costs: it is not a run's configuration"
        ) from None
    return Costs(*map(float, costs))


def _per_stage(durations: dict[str, Any], name: str, stages: int) -> list[float]:
    """Return one duration per stage; zeros if the run has no such pass."""
    values = durations[name]
    if values is None and name == "weight_backward":
        return [0.0] * stages
    if len(values) != stages:
        raise ValueError(f"{name} has {len(values)} durations for {stages} stages")
    return list(map(_seconds, values))


def _seconds(value: Any) -> float:
    """Return a duration in seconds. Raises ValueError unless it is finite and not negative."""
    if not 0 <= float(value) < LONGEST:
        raise ValueError(f"{value} is not a duration in seconds")
    return float(value)
