"""Pass that adds sends and receives to a schedule such that no execution of it can deadlock.

The runtime executes the result, and the validator models it, by these rules:

- *Channels.* All ranks of the pipeline axis share one communicator for each tensor kind (forward, backward)
  and direction along the rank order (up, down). On one communicator, the operations of a rank complete in the
  order in which it issued them, as with NCCL.
- *Rendezvous.* A send and its receive complete together, and only once each is the oldest unfinished
  operation of its rank on the channel.
- *Blocking.* Issuing a send or a receive never blocks. A compute action blocks until its receive has
  completed. The end of the step blocks until every send has completed; until then the runtime keeps the
  tensors that it sends.

Proof that this cannot deadlock: simulate the compute actions, and sort those of all ranks by their end times;
place each message right after the action that produced it. In this global order every item comes after its
dependencies. Compute actions on every rank, and operations on every channel of a rank, are issued in this
order, and no receive is issued later than its place in the order. Therefore the first unfinished item of the
global order can always finish: if it is a compute action, its inputs have arrived; if it is a message, both
ends have been issued and are the oldest on their channel. The proof does not require asynchronous sends: it
holds if each send blocks until it is received.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Literal, NamedTuple

from megalite.parallel.pipeline.schedule import Action, ActionKind, Schedule, ScheduleError, dependencies

PASS, MESSAGE = 16, 1  # durations of the simulation that determines the global order
# NCCL's buffers at one end of an edge. Estimate: 0.5 GB a peer with 32 thread blocks both ways; channels have
# 4
CONNECTION_BYTES = 32 << 20
OUTSTANDING_SENDS = 4  # maximum number of incomplete sends of a rank, which limits the memory of messages


class Channel(NamedTuple):
    """One communicator over the pipeline axis.

    It is for activations (forward) or gradients (backward), to higher (up) or lower (down) ranks.
    """

    kind: Literal["forward", "backward"]
    direction: Literal["up", "down"]

    @property
    def name(self) -> str:
        return f"{self.kind}_{self.direction}"


Edge = tuple[int, int]
"""Pipeline ranks (source, target) between which messages are sent."""
CHANNELS = (
    Channel("forward", "up"),
    Channel("forward", "down"),
    Channel("backward", "up"),
    Channel("backward", "down"),
)


def channel_of(action: Action, rank: int) -> Channel:
    """Return the channel of a rank's send or receive."""
    assert action.peer is not None, f"{action} is not a send or receive"
    forward = action.kind in (ActionKind.SEND_FORWARD, ActionKind.RECEIVE_FORWARD)
    up = (action.peer > rank) == action.is_send
    return Channel("forward" if forward else "backward", "up" if up else "down")


def edges(schedule: Schedule) -> dict[str, tuple[Edge, ...]]:
    """Return the channels that a schedule uses by name, each with its edges.

    Every rank creates the channels in this order.
    """
    used: dict[Channel, set[Edge]] = {channel: set() for channel in CHANNELS}
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if action.is_send and action.peer is not None:
                used[channel_of(action, rank)].add((rank, action.peer))
    return {channel.name: tuple(sorted(pairs)) for channel, pairs in used.items() if pairs}


def chain(ranks: int, down: bool = False) -> tuple[Edge, ...]:
    """Return the edges from each rank to the next, or to the previous one with `down`."""
    return tuple((rank + 1, rank) if down else (rank, rank + 1) for rank in range(ranks - 1))


def connection_bytes(used: Sequence[Edge], rank: int) -> int:
    """Return the memory of a rank's connections on a channel with NCCL.

    Each edge has buffers at both of its ends.
    """
    return sum(rank in edge for edge in used) * CONNECTION_BYTES


def send_after(action: Action, schedule: Schedule) -> Action | None:
    """Return the send of a compute action's result.

    The result is None within a rank, at the ends of the model, and for weight passes.
    """
    step = {ActionKind.FORWARD: 1, ActionKind.BACKWARD: -1}.get(action.kind)
    if step is None or not 0 <= action.stage + step < schedule.stages:
        return None
    source, target = schedule.placement[action.stage], schedule.placement[action.stage + step]
    kind = ActionKind.SEND_FORWARD if step == 1 else ActionKind.SEND_BACKWARD
    return None if source == target else Action(kind, action.stage, action.microbatch, target)


def receive_before(action: Action, schedule: Schedule) -> Action | None:
    """Return the receive of a compute action's input, or None.

    It matches `send_after` of the action that produces the input.
    """
    step = {ActionKind.FORWARD: 1, ActionKind.BACKWARD: -1}.get(action.kind)
    if step is None or not 0 <= action.stage - step < schedule.stages:
        return None
    source, target = schedule.placement[action.stage - step], schedule.placement[action.stage]
    kind = ActionKind.RECEIVE_FORWARD if step == 1 else ActionKind.RECEIVE_BACKWARD
    return None if source == target else Action(kind, action.stage, action.microbatch, source)


def received_from(receive: Action) -> Action:
    """Return the compute action on the peer whose result a receive receives."""
    if receive.kind is ActionKind.RECEIVE_FORWARD:
        return Action(ActionKind.FORWARD, receive.stage - 1, receive.microbatch)
    return Action(ActionKind.BACKWARD, receive.stage + 1, receive.microbatch)


def with_communication(schedule: Schedule) -> Schedule:
    """Add sends and receives to the compute actions of a schedule; gathers and reshards are added later.

    A send comes right after the action that produces its tensor. A receive comes one compute action before
    the one that needs it, so that the transfer overlaps with compute, or earlier if its tensor is expected
    earlier, but never before operations on its channel that precede it in the global order.

    Raises:
        ScheduleError: compute actions wait for each other in a cycle, or for one that is in no list.
    """
    order = _global_order(schedule)
    return replace(
        schedule,
        actions=tuple(_rank_actions(schedule, rank, order) for rank in range(schedule.ranks)),
        units=(),
    )


def _global_order(schedule: Schedule) -> dict[Action, int]:
    """Return the index of each compute action when all are sorted by their simulated end.

    Any positive durations give a correct order. If all passes take equally long, and much longer than a
    message, the order is close to execution. Integers make the order the same on every machine.
    """
    durations = {
        ActionKind.FORWARD: PASS,
        ActionKind.BACKWARD: PASS if ActionKind.WEIGHT in schedule.passes else 2 * PASS,
        ActionKind.WEIGHT: PASS,
    }
    todo = [deque(schedule.compute(rank)) for rank in range(schedule.ranks)]
    ends: dict[Action, float] = {}
    free, known = [0.0] * schedule.ranks, -1

    def end_of(action: Action, rank: int) -> float:
        """Return the time at which the next action of a rank ends, or infinity if it is not known yet."""
        needed = dependencies(action, schedule.stages)
        arrivals = (
            ends.get(other, inf) + (MESSAGE if schedule.placement[other.stage] != rank else 0)
            for other in needed
        )
        return max(free[rank], *arrivals, 0) + durations[action.kind]

    while known < len(ends):
        known = len(ends)
        for rank, actions in enumerate(todo):
            while actions and (end := end_of(actions[0], rank)) < inf:
                free[rank] = ends[actions.popleft()] = end
    for rank, actions in enumerate(todo):
        if actions:
            missing = next(other for other in dependencies(actions[0], schedule.stages) if other not in ends)
            raise ScheduleError(f"rank {rank}: {actions[0]} waits for {missing}, which never completes.")
    placed = sorted((end, schedule.placement[action.stage], action) for action, end in ends.items())
    return {action: place for place, (_, _, action) in enumerate(placed)}


def _rank_actions(schedule: Schedule, rank: int, order: dict[Action, int]) -> tuple[Action, ...]:
    """Return the list of one rank.

    The place of a message in `order` is that of the compute action that produced it.
    """
    compute = schedule.compute(rank)
    queues = _queues(schedule, compute, rank, order)
    actions: list[Action] = []
    for action, following in zip(compute, [*compute[1:], None], strict=True):
        # receives ordered before this action are issued before it …
        horizon = dict.fromkeys(queues, order[action])
        # … and so is the next action's, to overlap with this one
        if following and (receive := receive_before(following, schedule)):
            channel = channel_of(receive, rank)
            horizon[channel] = max(horizon[channel], order[received_from(receive)])
        for channel, queue in queues.items():
            while queue and not queue[0][1].is_send and queue[0][0] <= horizon[channel]:
                actions.append(queue.popleft()[1])
        actions.append(action)
        if send := send_after(action, schedule):
            actions.append(queues[channel_of(send, rank)].popleft()[1])
    return tuple(actions)


def _queues(
    schedule: Schedule, compute: list[Action], rank: int, order: dict[Action, int]
) -> dict[Channel, deque[tuple[int, Action]]]:
    """Return the rank's operations on each channel with their places in the global order, sorted by them."""
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
