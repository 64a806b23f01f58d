"""The time of a schedule with given stage durations: simulated, and extrapolated from the steady state for many microbatches.

A schedule with fixed durations is a system of sums and maxima, and such a system becomes periodic: from some number of microbatches on,
each further `cycle` of them adds the same time. A step of thousands of microbatches is therefore simulated at a few small sizes. Two equal
increments in a row count as settled if they are no less than the busiest rank's work: if they are less, another rank is still the
bottleneck, and the busiest one becomes it later. Otherwise the sizes grow, up to the whole step, so a schedule that does not settle is
simulated in full.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from megalite.parallel.pipeline.generator import build
from megalite.parallel.pipeline.orders import RECIPES
from megalite.parallel.pipeline.schedule import Schedule
from megalite.parallel.pipeline.simulator import simulate

SETTLED = 1e-9  # relative difference of two increments that count as equal: sums of floats differ in their last digits


@dataclass(frozen=True)
class ScheduleTime:
    """The times of one step of a pipeline.

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
        """Fraction of all ranks' time spent idle."""
        return 1 - sum(self.busy) / (len(self.busy) * self.makespan)


@functools.lru_cache(maxsize=512)
def schedule_of(name: str, ranks: int, microbatches: int, virtual_stages: int | None) -> Schedule:
    """The schedule that a run would execute, built for the default costs."""
    return build(name, ranks, microbatches, virtual_stages)


def pace(
    name: str,
    ranks: int,
    microbatches: int,
    virtual_stages: int | None,
    forward: Sequence[float],
    backward: Sequence[float],
    weight: Sequence[float],
    message: float,
) -> ScheduleTime:
    """The times of a step. Durations are per stage, of one microbatch; message: the latency of one message between two ranks."""
    if ranks == 1 and len(forward) == 1:
        busy = microbatches * (forward[0] + backward[0] + weight[0])
        return ScheduleTime(busy, busy, (0.0,), (0.0,), (busy,))
    cycle, rest = ranks, microbatches % ranks  # messages make waves as long as the pipeline; interleaved works in groups of pp microbatches
    few = rest + cycle * max(3, rest + 1 if RECIPES[name].chunks is None else 0)

    def simulated(count: int) -> ScheduleTime:
        return _simulated(name, ranks, count, virtual_stages, forward, backward, weight, message)

    while few + 2 * cycle < microbatches:
        one, two, three = (simulated(few + step * cycle) for step in range(3))
        if _settled(one, two, three):
            return _continued(one, two, (microbatches - few) // cycle)
        few = 2 * few - rest
    return simulated(microbatches)


def _simulated(name: str, ranks: int, microbatches: int, virtual_stages: int | None, *durations: Sequence[float] | float) -> ScheduleTime:
    found = simulate(schedule_of(name, ranks, microbatches, virtual_stages), *durations)  # type: ignore[arg-type]
    starts, ends = (tuple(spans[0].start for spans in found.spans), tuple(found.makespan - spans[-1].end for spans in found.spans))
    return ScheduleTime(found.makespan, found.longest_span, starts, ends, found.busy)


def _settled(one: ScheduleTime, two: ScheduleTime, three: ScheduleTime) -> bool:
    """Whether both increments add the same to the makespan and to the longest span, at least the busiest rank's work, and do not change
    the ends."""

    def equal(a: float, b: float) -> bool:
        return abs(a - b) <= SETTLED * three.makespan

    first = (two.makespan - one.makespan, two.longest_span - one.longest_span, *one.ends, *two.ends)
    second = (three.makespan - two.makespan, three.longest_span - two.longest_span, *two.ends, *three.ends)
    work = max(after - before for before, after in zip(two.busy, three.busy, strict=True))
    return min(first[:2]) >= work - SETTLED * three.makespan and all(equal(a, b) for a, b in zip(first, second, strict=True))


def _continued(one: ScheduleTime, two: ScheduleTime, cycles: int) -> ScheduleTime:
    """The time after `cycles` equal increments, extrapolated from the first two sizes."""

    def line(a: float, b: float) -> float:
        return a + cycles * (b - a)

    return ScheduleTime(
        line(one.makespan, two.makespan),
        line(one.longest_span, two.longest_span),
        two.starts,
        two.ends,
        tuple(map(line, one.busy, two.busy)),
    )
