"""Where the weight passes of a split backward go: into the gaps of an order of forwards and backwards. Imports no torch.

A weight gradient has no one waiting for it, so it can run whenever its rank would idle (Qi et al. 2023). Following the order in simulated
time, a rank runs the oldest weight pass that is left

- when its activations have reached the limit and a forward is next: the pass frees one;
- when its next forward or backward can not start yet, and the gap is long enough;
- when nothing else is left.

How long is long enough depends on the durations: a pass that does not fit delays what comes after it, and a gap that is left empty may
never come again. So the whole order is tried with a few thresholds, and the one whose slowest rank is done first is taken.
"""

from __future__ import annotations

import heapq
from dataclasses import replace

from megalite.parallel.pipeline.schedule import Action, Costs, Kind, Schedule, ScheduleError

THRESHOLDS = (1.0, 0.5, 0.0)  # of a weight pass's duration
LATE = 1e-9  # relative: sums of durations that should be equal differ by rounding


def with_weight_passes(schedule: Schedule, costs: Costs) -> Schedule:
    """The schedule with a weight pass for each backward, within its activation limits.

    Raises:
        ScheduleError: the order can not run within the limits, or waits for itself.
    """
    tries = [_Filling(schedule, costs, threshold) for threshold in (THRESHOLDS if costs.weight_backward > 0 else THRESHOLDS[:1])]
    best = min(tries, key=lambda filling: (filling.longest_span, filling.makespan))
    passes = (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT)
    return replace(schedule, actions=tuple(map(tuple, best.actions)), passes=passes)


class _Filling:
    """One run through the order: `actions` with the weight passes, and how long it takes."""

    def __init__(self, schedule: Schedule, costs: Costs, threshold: float):
        share = schedule.ranks / schedule.stages
        self.schedule, self.placement = schedule, schedule.placement
        self.durations = {
            Kind.FORWARD: costs.forward * share,
            Kind.BACKWARD: costs.input_backward * share,
            Kind.WEIGHT: costs.weight_backward * share,
        }
        self.comm = costs.comm
        self.gap = threshold * self.durations[Kind.WEIGHT] * (1 - LATE)
        ranks = range(schedule.ranks)
        self.actions: list[list[Action]] = [[] for _ in ranks]
        self._position = [0] * schedule.ranks
        self._weights_done = [0] * schedule.ranks
        self._backwards: list[list[Action]] = [[] for _ in ranks]
        self._held = [0] * schedule.ranks
        self._started = [-1.0] * schedule.ranks
        self._free = [0.0] * schedule.ranks
        self._ended: dict[tuple[bool, int, int], float] = {}  # (is forward, stage, microbatch)
        self._waiting: dict[tuple[bool, int, int], int] = {}  # what a rank waits for → that rank
        self._events = [(0.0, rank) for rank in ranks]
        while self._events:
            now, rank = heapq.heappop(self._events)
            self._decide(max(now, self._free[rank]), rank)
        self._check_complete()
        self.makespan = max(self._free)
        self.longest_span = max(end - start for start, end in zip(self._started, self._free, strict=True))

    def _decide(self, now: float, rank: int) -> None:
        """Run the rank's next action at `now`, or say when to look again."""
        order, position = self.schedule.actions[rank], self._position[rank]
        weight_left = self._weights_done[rank] < len(self._backwards[rank])
        if position == len(order):
            if weight_left:
                self._run_weight(now, rank)
            return
        action = order[position]
        if action.kind is Kind.FORWARD and self._held[rank] >= self.schedule.activation_limit[rank]:
            if weight_left:
                self._run_weight(now, rank)
            return  # without one the order is stuck, as _check_complete will say
        needed = self._needed(action)
        ready = 0.0 if needed is None else self._ended.get(needed)
        if ready is not None and needed is not None and self.placement[needed[1]] != rank:
            ready += self.comm
        if ready is not None and ready <= now * (1 + LATE):
            self._position[rank] += 1
            self._run(action, now, rank)
        elif weight_left and (ready is None or ready - now >= self.gap):
            self._run_weight(now, rank)
        elif ready is not None:
            heapq.heappush(self._events, (ready, rank))
        elif needed is not None:
            self._waiting[needed] = rank

    def _needed(self, action: Action) -> tuple[bool, int, int] | None:
        """The other action whose result this one needs."""
        kind, stage, microbatch = action[:3]
        if kind is Kind.FORWARD:
            return (True, stage - 1, microbatch) if stage > 0 else None
        last = stage + 1 == self.schedule.stages
        return (True, stage, microbatch) if last else (False, stage + 1, microbatch)

    def _run(self, action: Action, now: float, rank: int) -> None:
        if self._started[rank] < 0:
            self._started[rank] = now
        end = self._free[rank] = now + self.durations[action.kind]
        self.actions[rank].append(action)
        heapq.heappush(self._events, (end, rank))
        if action.kind is Kind.WEIGHT:
            self._held[rank] -= 1
            return
        if action.kind is Kind.FORWARD:
            self._held[rank] += 1
        else:
            self._backwards[rank].append(action)
        result = (action.kind is Kind.FORWARD, action.stage, action.microbatch)
        self._ended[result] = end
        waiting = self._waiting.pop(result, None)
        if waiting is not None:
            heapq.heappush(self._events, (end + (self.comm if waiting != rank else 0.0), waiting))

    def _run_weight(self, now: float, rank: int) -> None:
        backward = self._backwards[rank][self._weights_done[rank]]
        self._weights_done[rank] += 1
        self._run(Action(Kind.WEIGHT, backward.stage, backward.microbatch), now, rank)

    def _check_complete(self) -> None:
        for rank, order in enumerate(self.schedule.actions):
            if self._position[rank] < len(order):
                raise ScheduleError(
                    f"rank {rank}: {order[self._position[rank]]} never starts within {self.schedule.activation_limit[rank]} activations."
                )
