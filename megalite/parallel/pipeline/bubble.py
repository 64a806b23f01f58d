"""What a schedule costs: its bubble by all three names in use, its memory and its messages. One plan, every schedule, or a row of sizes.

The schedule is the one that `generator.build` gives the runtime, the time is the simulator's: nothing here is a formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from megalite.parallel.pipeline.communication import send_after, with_communication
from megalite.parallel.pipeline.gathering import check_gathering, with_gathering
from megalite.parallel.pipeline.generator import SCHEDULES, build
from megalite.parallel.pipeline.orders import RECIPES
from megalite.parallel.pipeline.schedule import Action, Costs, Kind, Schedule, ScheduleError, Unit, peak_activations
from megalite.parallel.pipeline.simulator import Timeline, simulate

BUBBLES = ("bubble_fraction", "bubble_over_ideal", "bubble_rate")
DIGITS = 12  # sums of equal durations differ by rounding: what is 0 should read 0


class Weights(NamedTuple):
    """Weights that data-parallel ranks share and gather for use (ZeRO-3).

    Attributes:
        gather: how long it takes to gather a rank's whole weights once.
        buckets: in how many parts, on each rank; at least one for each of its stages.
        reshard: free a part after each use (action), or at the end of the step (step).
    """

    gather: float
    buckets: int = 8
    reshard: Literal["action", "step"] = "action"

    def gathered(self, schedule: Schedule) -> Schedule:
        """The schedule with gathers and reshards; a part is a unit of the model."""
        chunks = schedule.stages // schedule.ranks
        buckets = max(self.buckets, chunks)
        units: list[tuple[Unit, ...]] = []
        for stage, rank in enumerate(schedule.placement):
            place = schedule.stages_of(rank).index(stage)
            own = range(buckets * place // chunks, buckets * (place + 1) // chunks)
            units.append(tuple(Unit(1 + stage * buckets + bucket, (bucket,)) for bucket in own))
        return with_gathering(schedule, tuple(units), keep=self.reshard == "step")


@dataclass(frozen=True)
class Plan:
    """A schedule, timed.

    Attributes:
        durations: forward, input_backward and weight_backward of one microbatch: a number for a rank's whole share of the model, or a list
            with one for each stage; comm is the latency of a message.
        unit: what durations are in, "" where any unit will do.
        weights: how they are gathered for use; None where they are whole.
    """

    schedule: Schedule
    timeline: Timeline
    durations: dict[str, Any]
    unit: str = ""
    weights: Weights | None = None

    @property
    def chunks(self) -> int:
        """Stages on each rank."""
        return self.schedule.stages // self.schedule.ranks

    @property
    def splits(self) -> bool:
        """Whether the backward is in two passes."""
        return Kind.WEIGHT in self.schedule.passes

    def size(self, axis: str) -> str | int:
        """The schedule's name, pp or microbatches."""
        sizes: dict[str, str | int] = {
            "schedule": self.schedule.name,
            "pp": self.schedule.ranks,
            "microbatches": self.schedule.microbatches,
        }
        return sizes[axis]

    def peaks(self, until: Kind = Kind.BACKWARD) -> list[float]:
        """For each rank, the most microbatches held at once by all its stages, each from its forward to the end of its `until` pass."""
        return [peak / self.chunks for peak in peak_activations(self.schedule, until)]

    def messages(self) -> list[int]:
        """For each rank, the messages that it sends in a step."""
        schedule, sent = self.schedule, [0] * self.schedule.ranks
        for stage, rank in enumerate(schedule.placement):
            sent[rank] += schedule.microbatches * sum(send_after(Action(kind, stage, 0), schedule) is not None for kind in schedule.passes)
        return sent

    def with_messages(self) -> Schedule:
        """The schedule as it would be executed."""
        schedule = with_communication(self.schedule)
        return schedule if self.weights is None else self.weights.gathered(schedule)

    def gathering(self) -> dict[str, Any]:
        """How weights are gathered, and for each rank how often they are gathered as a whole, the share of them that is whole at once at
        most, and the time that compute waits for them."""
        if self.weights is None:
            return {}
        ranks, gathers = range(self.schedule.ranks), [len(spans) for spans in self.timeline.gathers]
        buckets = [sum(len(self.schedule.units[stage]) for stage in self.schedule.stages_of(rank)) for rank in ranks]
        return {
            **self.weights._asdict(),
            "buckets": buckets[0],
            "weights_gathered": [count / own for count, own in zip(gathers, buckets, strict=True)],
            "weights_whole": [check_gathering(self.schedule, rank) / buckets[rank] for rank in ranks],
            "stalled": list(self.timeline.stalled),
        }

    def measures(self) -> dict[str, Any]:
        """Every figure by its name, as `megalite bubble --json` prints it. Peaks are in whole-stage activations of one microbatch."""
        timeline, schedule = self.timeline, self.schedule
        return {
            "schedule": schedule.name,
            "pp": schedule.ranks,
            "microbatches": schedule.microbatches,
            "virtual_stages": self.chunks,
            **self.durations,
            "makespan": timeline.makespan,
            "ideal": timeline.ideal,
            "longest_span": timeline.longest_span,
            **{name: round(getattr(timeline, name), DIGITS) for name in BUBBLES},
            "peak_activations": self.peaks(),
            "peak_with_weight_stash": self.peaks(Kind.WEIGHT),
            "messages": self.messages(),
            **self.gathering(),
        }


def plan(
    name: str,
    ranks: int,
    microbatches: int,
    virtual_stages: int | None = None,
    costs: Costs | None = None,
    weights: Weights | None = None,
) -> Plan:
    """Build a schedule for the costs, and time it by them.

    Raises:
        ScheduleError: as `build` does, or no pass takes any time.
    """
    costs = costs or Costs()
    if not costs.forward + costs.input_backward + costs.weight_backward > 0:
        raise ScheduleError("forward, input_backward and weight_backward are all 0: a step must take some time.")
    schedule = build(name, ranks, microbatches, virtual_stages, costs)
    if weights is not None:
        schedule = weights.gathered(schedule)
    return Plan(schedule, simulate(schedule, *costs, weights.gather if weights else 0), costs._asdict(), weights=weights)


def compare(
    ranks: int, microbatches: int, virtual_stages: int | None = None, costs: Costs | None = None, weights: Weights | None = None
) -> list[Plan]:
    """Every schedule at one size. `virtual_stages` goes to those that have a choice."""
    return [plan(name, ranks, microbatches, None if RECIPES[name].chunks else virtual_stages, costs, weights) for name in SCHEDULES]


def sweep(
    axis: Literal["pp", "microbatches"],
    values: Sequence[int],
    name: str | None,
    ranks: int | None,
    microbatches: int | None,
    virtual_stages: int | None = None,
    costs: Costs | None = None,
    weights: Weights | None = None,
) -> list[Plan]:
    """One schedule, or where `name` is None every one, at each size; `axis` says which of ranks and microbatches `values` stand for."""
    plans = []
    for value in values:
        sizes = (value, microbatches) if axis == "pp" else (ranks, value)
        assert sizes[0] is not None and sizes[1] is not None, "the size that does not vary must be given"
        if name is None:
            plans += compare(sizes[0], sizes[1], virtual_stages, costs, weights)
        else:
            plans.append(plan(name, sizes[0], sizes[1], virtual_stages, costs, weights))
    return plans
