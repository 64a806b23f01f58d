"""Insertion of the weight passes of a split backward into the gaps of an order of forwards and backwards.

No other rank waits for a weight gradient, so it can be computed whenever its rank would be idle (Qi et al.
2023). The order is executed in simulated time, in which a rank runs its oldest remaining weight pass

- when its activations have reached the limit and a forward is next, because the pass frees one;
- when its next forward or backward cannot start yet, and the gap is long enough;
- when nothing else is left.

The best minimum length of a gap depends on the durations: a pass that does not fit delays what follows, and a
gap that is left empty is wasted. The whole order is therefore tried with several thresholds, and the result
with the smallest longest span is used.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import replace
from math import inf

from megalite.parallel.pipeline.schedule import Action, ActionKind, Costs, Schedule, ScheduleError

THRESHOLDS = (1.0, 0.5, 0.0)  # minimum length of a gap, relative to a weight pass's duration
LATE = 1e-9  # relative tolerance: equal sums of durations differ by rounding


def with_weight_passes(schedule: Schedule, costs: Costs) -> Schedule:
    """Add a weight pass for each backward, within the activation limits of the schedule.

    Raises:
        ScheduleError: the order cannot run within the limits, or its actions wait for each other.
    """
    tries = [
        _Filling(schedule, costs, threshold)
        for threshold in (THRESHOLDS if costs.weight_backward > 0 else THRESHOLDS[:1])
    ]
    best = min(tries, key=lambda filling: (filling.longest_span, filling.makespan))
    passes = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.WEIGHT)
    return replace(schedule, actions=tuple(map(tuple, best.actions)), passes=passes)


class _Filling:
    """Simulation of the order with one threshold.

    Attributes:
        actions: for each rank, its order with weight passes.
        makespan: time from the start to the end of the last action.
        longest_span: longest time of any rank from its first to its last action.
    """

    def __init__(self, schedule: Schedule, costs: Costs, threshold: float):
        share = schedule.ranks / schedule.stages
        self.schedule, self.placement = schedule, schedule.placement
        self.durations = {
            ActionKind.FORWARD: costs.forward * share,
            ActionKind.BACKWARD: costs.input_backward * share,
            ActionKind.WEIGHT: costs.weight_backward * share,
        }
        self.comm = costs.comm
        self.gap = threshold * self.durations[ActionKind.WEIGHT] * (1 - LATE)
        ranks = range(schedule.ranks)
        self.actions: list[list[Action]] = [[] for _ in ranks]
        self._orders = [deque(actions) for actions in schedule.actions]
        self._left: list[deque[Action]] = [deque() for _ in ranks]  # backwards whose weight pass has not run
        self._held = [0] * schedule.ranks
        self._started = [inf] * schedule.ranks
        self._free = [0.0] * schedule.ranks
        self._ended: dict[tuple[bool, int, int], float] = {}  # (is forward, stage, microbatch)
        # (time, rank): the rank becomes free, or a message for it arrives
        self._events = [(0.0, rank) for rank in ranks]
        while self._events:
            now, rank = heapq.heappop(self._events)
            if now >= self._free[rank]:
                self._decide(now, rank)
        self._check_complete()
        self.makespan = max(self._free)
        self.longest_span = max(end - start for start, end in zip(self._started, self._free, strict=True))

    def _decide(self, now: float, rank: int) -> None:
        """Run the next action of the rank's order, or a weight pass.

        A weight pass runs if the action cannot start before the gap has passed.
        """
        order, left = self._orders[rank], self._left[rank]
        ready = self._ready(order[0], rank) if order else inf
        if ready <= now * (1 + LATE):
            self._run(order.popleft(), now, rank)
        elif left and ready - now >= self.gap:
            backward = left.popleft()
            self._run(Action(ActionKind.WEIGHT, backward.stage, backward.microbatch), now, rank)

    def _ready(self, action: Action, rank: int) -> float:
        """Return the time at which an action can start.

        The result is infinity if it is not known, or if the rank must free an activation first.
        """
        kind, stage, microbatch = action[:3]
        if kind is ActionKind.FORWARD and self._held[rank] >= self.schedule.activation_limit[rank]:
            return inf
        if kind is ActionKind.FORWARD:
            needed = (True, stage - 1, microbatch)
        else:
            last = stage + 1 == self.schedule.stages
            needed = (True, stage, microbatch) if last else (False, stage + 1, microbatch)
        if needed[1] < 0:
            return 0.0
        return self._ended.get(needed, inf) + (0.0 if self.placement[needed[1]] == rank else self.comm)

    def _run(self, action: Action, now: float, rank: int) -> None:
        self._started[rank] = min(self._started[rank], now)
        end = self._free[rank] = now + self.durations[action.kind]
        self.actions[rank].append(action)
        heapq.heappush(self._events, (end, rank))
        if action.kind is ActionKind.WEIGHT:
            self._held[rank] -= 1
            return
        forward = action.kind is ActionKind.FORWARD
        if forward:
            self._held[rank] += 1
        else:
            self._left[rank].append(action)
        self._ended[forward, action.stage, action.microbatch] = end
        target = action.stage + (1 if forward else -1)
        if 0 <= target < self.schedule.stages and self.placement[target] != rank:
            heapq.heappush(self._events, (end + self.comm, self.placement[target]))

    def _check_complete(self) -> None:
        for rank, order in enumerate(self._orders):
            if order:
                limit = self.schedule.activation_limit[rank]
                raise ScheduleError(
                    f"rank {rank}: {order[0]} never starts with at most {limit} activations in memory."
                )
