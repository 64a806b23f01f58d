"""Cost of a schedule: its bubble by all three common definitions, its memory and its messages.

The cost is computed for one plan, for all schedules, or for a sweep. The schedule is the one that
`generator.build` returns for the runtime, and times are simulated without closed formulas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from megalite.config.dims import fixed_stages
from megalite.parallel.pipeline.gather_actions import check_gathering, with_gathering
from megalite.parallel.pipeline.generator import SCHEDULES, build
from megalite.parallel.pipeline.schedule import (
    Action,
    ActionKind,
    Costs,
    Schedule,
    ScheduleError,
    Unit,
    peak_activations,
)
from megalite.parallel.pipeline.send_recv_actions import send_after, with_communication
from megalite.parallel.pipeline.simulator import Timeline, simulate

BUBBLES = ("bubble_fraction", "bubble_over_ideal", "bubble_rate")
DIGITS = 12  # rounds differences between sums of equal durations, so that 0 is printed as 0


class GatheredWeights(NamedTuple):
    """Weights that are sharded over data-parallel ranks and gathered for use (ZeRO-3).

    Attributes:
        gather: time to gather all weights of a rank once.
        buckets: number of buckets on each rank; at least one for each of its stages.
        reshard: free a bucket after each use (action), or at the end of the step (step).
    """

    gather: float
    buckets: int = 8
    reshard: Literal["action", "step"] = "action"

    def gathered(self, schedule: Schedule) -> Schedule:
        """Return the schedule with gathers and reshards, where each bucket is one unit of the model."""
        chunks = schedule.stages // schedule.ranks
        buckets = max(self.buckets, chunks)
        units: list[tuple[Unit, ...]] = []
        for stage, rank in enumerate(schedule.placement):
            place = schedule.stages_of(rank).index(stage)
            own = range(buckets * place // chunks, buckets * (place + 1) // chunks)
            units.append(tuple(Unit(1 + stage * buckets + bucket, (bucket,)) for bucket in own))
        return with_gathering(schedule, tuple(units), keep=self.reshard == "step")


@dataclass(frozen=True)
class BubblePlan:
    """A schedule and its simulated times.

    Attributes:
        durations: forward, input_backward and weight_backward of one microbatch, each either one number for a
            rank's whole share of the model or a list with one number per stage; comm is the latency of a
            message.
        unit: unit of the durations; "" if they have none.
        weights: how weights are gathered for use; None if they are not sharded.
    """

    schedule: Schedule
    timeline: Timeline
    durations: dict[str, Any]
    unit: str = ""
    weights: GatheredWeights | None = None

    @property
    def chunks(self) -> int:
        """Number of stages on each rank."""
        return self.schedule.stages // self.schedule.ranks

    @property
    def splits(self) -> bool:
        """Whether the backward is split into an input and a weight pass."""
        return ActionKind.WEIGHT in self.schedule.passes

    def size(self, axis: str) -> str | int:
        """Return the schedule's name, pp or the number of microbatches."""
        sizes: dict[str, str | int] = {
            "schedule": self.schedule.name,
            "pp": self.schedule.ranks,
            "microbatches": self.schedule.microbatches,
        }
        return sizes[axis]

    def peaks(self, until: ActionKind = ActionKind.BACKWARD) -> list[float]:
        """Return the peak memory of each rank, in whole-stage activations of one microbatch.

        An activation is kept from the forward to the end of the `until` pass.
        """
        return [peak / self.chunks for peak in peak_activations(self.schedule, until)]

    def messages(self) -> list[int]:
        """Return the number of messages that each rank sends in a step."""
        schedule, sent = self.schedule, [0] * self.schedule.ranks
        for stage, rank in enumerate(schedule.placement):
            sent[rank] += schedule.microbatches * sum(
                send_after(Action(kind, stage, 0), schedule) is not None for kind in schedule.passes
            )
        return sent

    def with_messages(self) -> Schedule:
        """Return the schedule with its messages and gathers, as it is executed."""
        schedule = with_communication(self.schedule)
        return schedule if self.weights is None else self.weights.gathered(schedule)

    def gathering(self) -> dict[str, Any]:
        """Return the parameters and costs of gathering weights.

        The costs are, for each rank, how many times a step gathers all weights, the largest fraction of them
        that is gathered at once, and the time that compute waits for them.
        """
        if self.weights is None:
            return {}
        ranks, gathers = range(self.schedule.ranks), [len(spans) for spans in self.timeline.gathers]
        buckets = [
            sum(len(self.schedule.units[stage]) for stage in self.schedule.stages_of(rank)) for rank in ranks
        ]
        return {
            **self.weights._asdict(),
            "buckets": buckets[0],
            "weights_gathered": [count / own for count, own in zip(gathers, buckets, strict=True)],
            "weights_whole": [check_gathering(self.schedule, rank) / buckets[rank] for rank in ranks],
            "stalled": list(self.timeline.stalled),
        }

    def measures(self) -> dict[str, Any]:
        """Return all figures by name, as printed by `megalite bubble --json`.

        Peaks are in whole-stage activations of one microbatch.
        """
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
            "peak_with_weight_stash": self.peaks(ActionKind.WEIGHT),
            "messages": self.messages(),
            **self.gathering(),
        }


def plan(
    name: str,
    ranks: int,
    microbatches: int,
    virtual_stages: int | None = None,
    costs: Costs | None = None,
    weights: GatheredWeights | None = None,
) -> BubblePlan:
    """Build a schedule for the costs, and simulate it with them.

    Raises:
        ScheduleError: see `build`; or all durations are 0.
    """
    costs = costs or Costs()
    if not costs.forward + costs.input_backward + costs.weight_backward > 0:
        raise ScheduleError(
            "forward, input_backward and weight_backward are all 0. At least one must be positive."
        )
    schedule = build(name, ranks, microbatches, virtual_stages, costs)
    if weights is not None:
        schedule = weights.gathered(schedule)
    return BubblePlan(
        schedule,
        simulate(schedule, *costs, weights.gather if weights else 0),
        costs._asdict(),
        weights=weights,
    )


def compare(
    ranks: int,
    microbatches: int,
    virtual_stages: int | None = None,
    costs: Costs | None = None,
    weights: GatheredWeights | None = None,
) -> list[BubblePlan]:
    """Return a plan for each schedule at one size.

    Args:
        virtual_stages: applies to schedules with a variable number of stages per rank.
    """
    return [
        plan(name, ranks, microbatches, None if fixed_stages(name) else virtual_stages, costs, weights)
        for name in SCHEDULES
    ]


def sweep(
    axis: Literal["pp", "microbatches"],
    values: Sequence[int],
    name: str | None,
    ranks: int | None,
    microbatches: int | None,
    virtual_stages: int | None = None,
    costs: Costs | None = None,
    weights: GatheredWeights | None = None,
) -> list[BubblePlan]:
    """Return plans of one schedule, or of all if `name` is None, for all `values` of `axis`.

    Args:
        axis: pp (ranks) or microbatches.
    """
    plans = []
    for value in values:
        sizes = (value, microbatches) if axis == "pp" else (ranks, value)
        assert sizes[0] is not None and sizes[1] is not None, "expected the size that does not vary"
        if name is None:
            plans += compare(sizes[0], sizes[1], virtual_stages, costs, weights)
        else:
            plans.append(plan(name, sizes[0], sizes[1], virtual_stages, costs, weights))
    return plans
