"""Simulation of a schedule: the exact start and end of each action for given durations.

A rank computes one action at a time, in the order of its list. An action starts when its rank is free and its
inputs have arrived: immediately from the same rank, one message latency after the end of their computation
from another. Messages overlap with compute. If weights are gathered for use (ZeRO-3), a rank gathers one
bucket at a time, overlapping with its compute, in the order of its list, and a unit of the model waits for
its buckets; the units of a stage take equal time.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megalite.parallel.pipeline.gather_actions import uses
from megalite.parallel.pipeline.schedule import Action, ActionKind, Schedule, ScheduleError, dependencies


class Interval(NamedTuple):
    """Start and end of one action."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Times of the compute actions of all ranks, in the unit of the given durations.

    Attributes:
        spans: for each rank, its compute actions.
        gathers: for each rank, its gathers; empty if weights are not sharded.
        stalls: for each rank, (start, end) of each time that its actions wait for weights.
    """

    spans: tuple[tuple[Interval, ...], ...]
    gathers: tuple[tuple[Interval, ...], ...] = ()
    stalls: tuple[tuple[tuple[float, float], ...], ...] = ()

    @property
    def makespan(self) -> float:
        """Time from the start of the first action to the end of the last one, over all ranks."""
        return max(spans[-1].end for spans in self.spans)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Compute time of each rank, without stalls."""
        waits = self.stalled or (0.0,) * len(self.spans)
        return tuple(
            sum(end - start for _, start, end in spans) - wait
            for spans, wait in zip(self.spans, waits, strict=True)
        )

    @property
    def stalled(self) -> tuple[float, ...]:
        """Time that the actions of each rank wait for weights."""
        return tuple(sum(end - start for start, end in waits) for waits in self.stalls)

    @property
    def ideal(self) -> float:
        """Duration of the step without any waiting: the mean compute time of the ranks."""
        return sum(self.busy) / len(self.spans)

    @property
    def longest_span(self) -> float:
        """Longest time of any rank from its first to its last action.

        This is the time per step if steps follow each other without a barrier: a rank then begins the next
        step while others finish this one.
        """
        return max(spans[-1].end - spans[0].start for spans in self.spans)

    @property
    def bubble_fraction(self) -> float:
        """Fraction of the ranks' time that is idle: idle / makespan."""
        return 1 - self.ideal / self.makespan

    @property
    def bubble_over_ideal(self) -> float:
        """Idle time relative to the ideal, usually given as (p - 1) / m (Narayanan et al. 2021)."""
        return self.makespan / self.ideal - 1

    @property
    def bubble_rate(self) -> float:
        """(longest span - ideal) / longest span, the measure of the zero-bubble papers (Qi et al. 2023)."""
        return 1 - self.ideal / self.longest_span


def simulate(
    schedule: Schedule,
    forward: float | Sequence[float] = 1,
    input_backward: float | Sequence[float] = 1,
    weight_backward: float | Sequence[float] = 1,
    comm: float = 0,
    gather: float = 0,
) -> Timeline:
    """Simulate a schedule.

    Args:
        forward, input_backward, weight_backward: duration of one microbatch on a rank's whole share of the
            model (a virtual stage takes its part of it), or one duration for each stage. A schedule without a
            WEIGHT pass computes both gradients in its backward.
        comm: latency of one message between two ranks; any number of messages can be in flight, and none is
            needed within a rank.
        gather: time to gather all weights of a rank once; each of its buckets takes an equal part.

    Raises:
        ScheduleError: actions wait for each other in a cycle, or for one that is in no list.
    """
    durations = _durations(schedule, forward, input_backward, weight_backward)
    ended: Ends = {(kind, stage): {} for kind in durations for stage in range(schedule.stages)}
    inputs = {(kind, stage): _inputs(schedule, kind, stage, comm, ended) for kind, stage in ended}
    todo = [deque(schedule.compute(rank)) for rank in range(schedule.ranks)]
    links = [_Link(schedule, rank, gather) for rank in range(schedule.ranks)] if schedule.units else []
    spans: list[list[Interval]] = [[] for _ in todo]
    # action not yet ended → ranks that need it next
    waiting: defaultdict[Action, list[int]] = defaultdict(list)
    runnable = list(range(schedule.ranks))
    while runnable:
        rank = runnable.pop()
        now = spans[rank][-1].end if spans[rank] else 0.0
        while todo[rank]:
            action = todo[rank][0]
            kind, stage, microbatch = action[:3]
            start = _earliest(now, inputs[kind, stage], microbatch)
            if start is None:
                missing = next(other.source for other in inputs[kind, stage] if microbatch not in other.ends)
                waiting[Action(*missing, microbatch)].append(rank)
                break
            now = (
                links[rank].run(action, now, start, durations[kind][stage])
                if links
                else start + durations[kind][stage]
            )
            spans[rank].append(Interval(action, start, now))
            ended[kind, stage][microbatch] = now
            todo[rank].popleft()
            if action in waiting:
                runnable += waiting.pop(action)
    for missing_action, ranks in waiting.items():
        raise ScheduleError(
            f"rank {ranks[0]}: {todo[ranks[0]][0]} waits for {missing_action}, which never completes."
        )
    return Timeline(
        tuple(map(tuple, spans)),
        tuple(tuple(link.spans) for link in links),
        tuple(tuple(link.stalls) for link in links),
    )


Ends = dict[tuple[ActionKind, int], dict[int, float]]
"""End of the pass of each microbatch on a stage: (pass, stage) → microbatch → time."""


class _Input(NamedTuple):
    """An input of a pass.

    It consists of the end of its computation for each microbatch, the latency of its message, and its source
    (pass, stage).
    """

    ends: dict[int, float]
    latency: float
    source: tuple[ActionKind, int]


class _Link:
    """Simulation of a rank's gathers, one bucket after the other."""

    def __init__(self, schedule: Schedule, rank: int, gather: float):
        self.schedule = schedule
        # (pass, stage, microbatch, unit)
        self.moves: defaultdict[tuple[ActionKind, int, int, int | None], list[Action]] = defaultdict(list)
        waiting: list[Action] = []
        for action in schedule.actions[rank]:
            if action.kind is ActionKind.GATHER:
                waiting.append(action)
            elif action.is_compute:
                for move in waiting:
                    self.moves[*action[:3], move.unit].append(move)
                waiting = []
        buckets = {
            bucket
            for stage in schedule.stages_of(rank)
            for unit in schedule.units[stage]
            for bucket in unit.buckets
        }
        self.seconds = gather / max(len(buckets), 1)
        self.whole: dict[int, float] = {}  # bucket → time at which its last gather ends
        self.spans: list[Interval] = []
        self.stalls: list[tuple[float, float]] = []

    def run(self, action: Action, free: float, start: float, duration: float) -> float:
        """Return the end of an action.

        Args:
            free: time at which its rank is free.
            start: time at which its inputs are available.
        """
        self._gather(action, None, free)
        units, now = uses(action, self.schedule), start
        for unit in units:
            ready = max([now, *(self.whole[bucket] for bucket in unit.buckets)])
            if ready > now:
                self.stalls.append((now, ready))
            self._gather(action, unit.number, ready)
            now = ready + duration / len(units)
        return now if units else start + duration

    def _gather(self, action: Action, unit: int | None, now: float) -> None:
        for move in self.moves.get((*action[:3], unit), ()):
            assert move.bucket is not None
            begin = max(now, self.spans[-1].end if self.spans else 0.0)
            self.spans.append(Interval(move, begin, begin + self.seconds))
            self.whole[move.bucket] = begin + self.seconds


def _inputs(schedule: Schedule, kind: ActionKind, stage: int, comm: float, ended: Ends) -> list[_Input]:
    """Return the inputs of a pass on a stage."""
    rank = schedule.placement[stage]
    sources = [(other.kind, other.stage) for other in dependencies(Action(kind, stage, 0), schedule.stages)]
    return [
        _Input(ended[source], comm if schedule.placement[source[1]] != rank else 0, source)
        for source in sources
    ]


def _earliest(now: float, inputs: list[_Input], microbatch: int) -> float | None:
    """Return the earliest time at which a pass can start on a rank that is free at `now`.

    The result is None if the end of an input is not known yet.
    """
    for ends, latency, _ in inputs:
        end = ends.get(microbatch)
        if end is None:
            return None
        if end + latency > now:
            now = end + latency
    return now


def _durations(schedule: Schedule, *whole: float | Sequence[float]) -> dict[ActionKind, list[float]]:
    """Return the duration of each compute kind on each stage."""
    share = schedule.ranks / schedule.stages

    def per_stage(value: float | Sequence[float]) -> list[float]:
        return list(value) if isinstance(value, Sequence) else [value * share] * schedule.stages

    forward, backward, weight = map(per_stage, whole)
    if ActionKind.WEIGHT not in schedule.passes:
        backward = [b + w for b, w in zip(backward, weight, strict=True)]
    return {ActionKind.FORWARD: forward, ActionKind.BACKWARD: backward, ActionKind.WEIGHT: weight}
