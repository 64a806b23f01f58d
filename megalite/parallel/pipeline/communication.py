"""The pass that adds sends and receives to a schedule, so that no execution of it can deadlock. Imports no torch.

What the runtime does with the result, and what the validator models:

- *Channels.* All ranks of the pipeline axis share one communicator for each tensor kind (forward, backward) and direction along the
  rank order (up, down). On one communicator, a rank's operations complete in the order in which the rank issued them, as NCCL's do.
- *Rendezvous.* A send and its receive complete together, and only once each is the oldest unfinished operation of its rank on the channel.
- *What blocks.* Issuing a send or a receive never blocks. A compute action blocks until its own receive has completed. The end of the
  step blocks until every send has completed; until then the runtime holds what it sends.

Why this cannot deadlock: time every compute action and sort all of them, over all ranks, by when they end; put each message right after the
action that produced it. In this one global order everything comes after what it depends on. On every rank the compute actions, and on every
channel of a rank the operations, are issued in this order, and no receive later than its place in it. So the first unfinished item of the
global order is always free to finish: were it a compute action, its inputs would have arrived; were it a message, both ends would have been
issued and be the oldest on their channel. The argument needs no asynchronous sends: it holds when each send blocks until it is received.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from math import inf
from typing import Literal, NamedTuple

from megalite.parallel.pipeline.schedule import Action, Kind, Schedule, ScheduleError, dependencies

PASS, MESSAGE = 16, 1  # durations by which messages are ordered
OUTSTANDING_SENDS = 4  # sends that a rank may leave incomplete: bounds the memory that messages hold


class Channel(NamedTuple):
    """One communicator over the pipeline axis: what travels on it, and whether to higher (up) or lower (down) ranks."""

    kind: Literal["forward", "backward"]
    direction: Literal["up", "down"]

    @property
    def name(self) -> str:
        return f"{self.kind}_{self.direction}"


CHANNELS = (Channel("forward", "up"), Channel("forward", "down"), Channel("backward", "up"), Channel("backward", "down"))


def channel_of(action: Action, rank: int) -> Channel:
    """The channel that a rank's send or receive belongs to."""
    assert action.peer is not None, f"{action} does not communicate"
    forward = action.kind in (Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD)
    up = (action.peer > rank) == action.is_send
    return Channel("forward" if forward else "backward", "up" if up else "down")


def channels(schedule: Schedule) -> list[Channel]:
    """The channels that a schedule uses, in the order in which every rank creates them."""
    used = {channel_of(action, rank) for rank, actions in enumerate(schedule.actions) for action in actions if action.is_message}
    return [channel for channel in CHANNELS if channel in used]


def send_after(action: Action, schedule: Schedule) -> Action | None:
    """The send that a compute action's result needs: none within a rank, at the ends of the model, and for weight gradients."""
    step = {Kind.FORWARD: 1, Kind.BACKWARD: -1}.get(action.kind)
    if step is None or not 0 <= action.stage + step < schedule.stages:
        return None
    source, target = schedule.placement[action.stage], schedule.placement[action.stage + step]
    kind = Kind.SEND_FORWARD if step == 1 else Kind.SEND_BACKWARD
    return None if source == target else Action(kind, action.stage, action.microbatch, target)


def receive_before(action: Action, schedule: Schedule) -> Action | None:
    """The receive that a compute action needs: the other end of its predecessor's send."""
    step = {Kind.FORWARD: 1, Kind.BACKWARD: -1}.get(action.kind)
    if step is None or not 0 <= action.stage - step < schedule.stages:
        return None
    source, target = schedule.placement[action.stage - step], schedule.placement[action.stage]
    kind = Kind.RECEIVE_FORWARD if step == 1 else Kind.RECEIVE_BACKWARD
    return None if source == target else Action(kind, action.stage, action.microbatch, source)


def received_from(receive: Action) -> Action:
    """The compute action, on the peer, whose result a receive takes."""
    if receive.kind is Kind.RECEIVE_FORWARD:
        return Action(Kind.FORWARD, receive.stage - 1, receive.microbatch)
    return Action(Kind.BACKWARD, receive.stage + 1, receive.microbatch)


def with_communication(schedule: Schedule) -> Schedule:
    """The schedule's compute actions with their sends and receives; gathers and reshards are added afterwards.

    A send stands right after the action that makes its tensor. A receive stands one compute action ahead of the one that needs it, so that
    the transfer overlaps with compute, or further ahead where its tensor is expected even earlier; but never ahead of operations on
    its channel that precede it in the global order.

    Raises:
        ScheduleError: the compute actions wait for each other in a circle, or for one that is in no list.
    """
    order = _global_order(schedule)
    return replace(schedule, actions=tuple(_rank_actions(schedule, rank, order) for rank in range(schedule.ranks)), units=())


def _global_order(schedule: Schedule) -> dict[Action, int]:
    """Every compute action's place when all are sorted by their end.

    Any positive durations give a correct order. Equal ones for all passes, long against a message, give one that runs close to it.
    Integers keep the order the same on every machine.
    """
    durations = {Kind.FORWARD: PASS, Kind.BACKWARD: PASS if Kind.WEIGHT in schedule.passes else 2 * PASS, Kind.WEIGHT: PASS}
    todo = [deque(schedule.compute(rank)) for rank in range(schedule.ranks)]
    ends: dict[Action, float] = {}
    free, known = [0.0] * schedule.ranks, -1

    def end_of(action: Action, rank: int) -> float:
        """When the next action of a rank ends; infinity where that is not known yet."""
        needed = dependencies(action, schedule.stages)
        arrivals = (ends.get(other, inf) + (MESSAGE if schedule.placement[other.stage] != rank else 0) for other in needed)
        return max(free[rank], *arrivals, 0) + durations[action.kind]

    while known < len(ends):
        known = len(ends)
        for rank, actions in enumerate(todo):
            while actions and (end := end_of(actions[0], rank)) < inf:
                free[rank] = ends[actions.popleft()] = end
    for rank, actions in enumerate(todo):
        if actions:
            missing = next(other for other in dependencies(actions[0], schedule.stages) if other not in ends)
            raise ScheduleError(f"rank {rank}: {actions[0]} waits for {missing}, which never ends.")
    placed = sorted((end, schedule.placement[action.stage], action) for action, end in ends.items())
    return {action: place for place, (_, _, action) in enumerate(placed)}


def _rank_actions(schedule: Schedule, rank: int, order: dict[Action, int]) -> tuple[Action, ...]:
    """One rank's list. `order` places a message by the compute action that produced it."""
    compute = schedule.compute(rank)
    queues = _queues(schedule, compute, rank, order)
    actions: list[Action] = []
    for action, following in zip(compute, [*compute[1:], None], strict=True):
        horizon = dict.fromkeys(queues, order[action])  # receives placed before this action come first …
        if following and (receive := receive_before(following, schedule)):  # … and so does the next action's, to overlap with this one
            channel = channel_of(receive, rank)
            horizon[channel] = max(horizon[channel], order[received_from(receive)])
        for channel, queue in queues.items():
            while queue and not queue[0][1].is_send and queue[0][0] <= horizon[channel]:
                actions.append(queue.popleft()[1])
        actions.append(action)
        if send := send_after(action, schedule):
            actions.append(queues[channel_of(send, rank)].popleft()[1])
    return tuple(actions)


def _queues(schedule: Schedule, compute: list[Action], rank: int, order: dict[Action, int]) -> dict[Channel, deque[tuple[int, Action]]]:
    """For each channel the rank's operations with their global places, in that order."""
    operations = []
    for action in compute:
        if receive := receive_before(action, schedule):
            operations.append((order[received_from(receive)], receive))
        if send := send_after(action, schedule):
            operations.append((order[action], send))
    queues: dict[Channel, deque[tuple[int, Action]]] = {channel: deque() for channel in CHANNELS}
    for place, operation in sorted(operations):
        queues[channel_of(operation, rank)].append((place, operation))
    return queues
