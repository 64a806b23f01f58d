"""The time of a schedule with given stage durations: simulated, and extrapolated from the steady state for
many microbatches.

A schedule with fixed durations is a system of sums and maxima, and such a system becomes periodic: from some
number of microbatches on, each further `cycle` of them adds the same time. A step of thousands of
microbatches is therefore simulated at a few small sizes. Two equal increments in a row count as settled if
they are no less than the busiest rank's work: if they are less, another rank is still the bottleneck, and the
busiest one becomes it later. Otherwise the sizes grow, up to the whole step, so a schedule that does not
settle is simulated in full.

One schedule is timed with the durations of many layouts, so what its actions wait for is found once
(`_Replay`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megalite.config.dims import fixed_stages
from megalite.parallel.pipeline.generator import build
from megalite.parallel.pipeline.orders import RECIPES
from megalite.parallel.pipeline.schedule import Action, ActionKind, Schedule, dependencies

# relative difference of two increments that count as equal: sums of floats differ in their last digits
SETTLED = 1e-9


@dataclass(frozen=True)
class ScheduleTime:
    """Times of one step of a pipeline.

    Attributes:
        makespan: from the first action of any rank to the last of any.
        longest_span: from the first to the last action of one rank, the longest of any.
        starts, ends: each rank's first start, and the time from its last end to the makespan.
        busy: the computation time of each rank.
    """

    makespan: float
    longest_span: float
    starts: tuple[float, ...]
    ends: tuple[float, ...]
    busy: tuple[float, ...]

    @property
    def bubble_fraction(self) -> float:
        """Return the fraction of all ranks' time that is idle."""
        return 1 - sum(self.busy) / (len(self.busy) * self.makespan)


class PipelineShape(NamedTuple):
    """Arguments of a schedule.

    Attributes:
        virtual_stages: as in the configuration.
        forward_only: without backwards.
    """

    name: str
    ranks: int
    microbatches: int
    virtual_stages: int | None
    forward_only: bool = False


class Durations(NamedTuple):
    """Seconds of the passes of one microbatch, by stage, and the latency of a message between ranks."""

    forward: Sequence[float]
    backward: Sequence[float]
    weight: Sequence[float]
    message: float


@functools.lru_cache(maxsize=512)
def schedule_of(pipeline: PipelineShape) -> Schedule:
    """Return the schedule that a run would execute, built for the default costs."""
    name, ranks, microbatches, virtual_stages, forward_only = pipeline
    return build(name, ranks, microbatches, virtual_stages, forward_only=forward_only)


def pace(pipeline: PipelineShape, durations: Durations) -> ScheduleTime:
    """Return the times of a step."""
    name, ranks, microbatches, *_ = pipeline
    if ranks == 1 and len(durations.forward) == 1:
        busy = microbatches * (durations.forward[0] + durations.backward[0] + durations.weight[0])
        return ScheduleTime(busy, busy, (0.0,), (0.0,), (busy,))
    # messages make waves as long as the pipeline; interleaved works in groups of pp microbatches
    cycle, rest = ranks, microbatches % ranks
    few = rest + cycle * max(3, rest + 1 if fixed_stages(name) is None else 0)

    def simulated(count: int) -> ScheduleTime:
        return _simulated(pipeline._replace(microbatches=count), durations)

    while few + 2 * cycle < microbatches:
        one, two, three = (simulated(few + step * cycle) for step in range(3))
        if _settled(one, two, three):
            return _continued(one, two, (microbatches - few) // cycle)
        few = 2 * few - rest
    return simulated(microbatches)


class _Replay:
    """Actions of a schedule, each after those that it waits for, to time them as `simulate` does."""

    def __init__(self, schedule: Schedule):
        self.ranks, self.stages = schedule.ranks, schedule.stages
        self._ranks, self._slots, self._sources = list[int](), list[int](), list[int]()
        kinds = list(schedule.passes)
        self.passes = {
            (kind, stage): kinds.index(kind) * self.stages + stage
            for kind in kinds
            for stage in range(self.stages)
        }
        elsewhere = {each: self._elsewhere(schedule, *each) for each in self.passes}
        todo, at = [schedule.compute(rank) for rank in range(self.ranks)], [0] * self.ranks
        numbers, waiting = dict[tuple[ActionKind, int, int], int](), dict[tuple[ActionKind, int, int], int]()
        runnable = list(range(self.ranks))
        while runnable:
            rank = runnable.pop()
            for action in todo[rank][at[rank] :]:
                kind, stage, microbatch = action[:3]
                source = elsewhere[kind, stage]
                needed = None if source is None else (*source, microbatch)
                if needed is not None and needed not in numbers:
                    waiting[needed] = rank
                    break
                self._sources.append(-1 if needed is None else numbers[needed])
                self._ranks.append(rank)
                self._slots.append(self.passes[kind, stage])
                numbers[kind, stage, microbatch] = len(numbers)
                at[rank] += 1
                if (kind, stage, microbatch) in waiting:
                    runnable.append(waiting.pop((kind, stage, microbatch)))
        self._counts = [
            [
                (self.passes[kind, stage], schedule.microbatches)
                for kind in kinds
                for stage in schedule.stages_of(rank)
            ]
            for rank in range(self.ranks)
        ]

    @staticmethod
    def _elsewhere(schedule: Schedule, kind: ActionKind, stage: int) -> tuple[ActionKind, int] | None:
        """Return the input of a pass that another rank computes, if there is one.

        Inputs of its own rank are earlier in its list.
        """
        sources = [
            (other.kind, other.stage) for other in dependencies(Action(kind, stage, 0), schedule.stages)
        ]
        return next(
            (source for source in sources if schedule.placement[source[1]] != schedule.placement[stage]), None
        )

    def time(self, durations: Sequence[float], message: float) -> ScheduleTime:
        """Return the times of a step.

        Args:
            durations: of each pass, in the order of `passes`.
        """
        free, ended = [0.0] * self.ranks, list[float]()
        starts: list[float | None] = [None] * self.ranks
        for rank, slot, source in zip(self._ranks, self._slots, self._sources, strict=True):
            begin = free[rank]
            if source >= 0 and ended[source] + message > begin:
                begin = ended[source] + message
            if starts[rank] is None:
                starts[rank] = begin
            free[rank] = end = begin + durations[slot]
            ended.append(end)
        first, makespan = tuple(start or 0.0 for start in starts), max(free)
        busy = tuple(sum(count * durations[slot] for slot, count in own) for own in self._counts)
        return ScheduleTime(
            makespan,
            max(end - start for start, end in zip(first, free, strict=True)),
            first,
            tuple(makespan - end for end in free),
            busy,
        )


@functools.lru_cache(maxsize=128)
def _replay_of(pipeline: PipelineShape) -> _Replay:
    return _Replay(schedule_of(pipeline))


def _simulated(pipeline: PipelineShape, durations: Durations) -> ScheduleTime:
    forward, backward, weight, message = durations
    if not RECIPES[pipeline.name].splits:
        backward, weight = [b + w for b, w in zip(backward, weight, strict=True)], ()
    return _replay_of(pipeline).time([*forward, *backward, *weight], message)


def _settled(one: ScheduleTime, two: ScheduleTime, three: ScheduleTime) -> bool:
    """Return whether both increments are equal and no smaller than the busiest rank's work.

    Compared are makespan, longest span and ends.
    """

    def equal(a: float, b: float) -> bool:
        return abs(a - b) <= SETTLED * three.makespan

    first = (two.makespan - one.makespan, two.longest_span - one.longest_span, *one.ends, *two.ends)
    second = (three.makespan - two.makespan, three.longest_span - two.longest_span, *two.ends, *three.ends)
    work = max(after - before for before, after in zip(two.busy, three.busy, strict=True))
    return min(first[:2]) >= work - SETTLED * three.makespan and all(
        equal(a, b) for a, b in zip(first, second, strict=True)
    )


def _continued(one: ScheduleTime, two: ScheduleTime, cycles: int) -> ScheduleTime:
    """Return the time after `cycles` equal increments, extrapolated from the first two sizes."""

    def line(a: float, b: float) -> float:
        return a + cycles * (b - a)

    return ScheduleTime(
        line(one.makespan, two.makespan),
        line(one.longest_span, two.longest_span),
        two.starts,
        two.ends,
        tuple(map(line, one.busy, two.busy)),
    )
