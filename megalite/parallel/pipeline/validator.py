"""Checks that a schedule is correct, terminates and respects its memory limit, before any process starts.

The checks:

1. *Complete*: the list of each rank has exactly the compute actions of its stages and exactly the sends and
   receives that they need.
2. *Ordered*: in the list of its rank, an action follows its dependencies; a receive precedes and a send
   follows its compute action; backward and weight passes of a stage run in ascending microbatch order, so
   that gradients are added in one order under every schedule.
3. *Progress*: the lists, executed by the rules in `send_recv_actions.py`, run to their end, and each receive
   matches the send of its own message. (All messages of a step have the same shape: with a crossed order,
   wrong data would be received without an error.)
4. *Memory*: no rank keeps more activations than its limit.
5. *Weights*: if they are gathered for use, the buckets of each unit are gathered when it computes.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque

from megalite.parallel.pipeline.gather_actions import check_gathering
from megalite.parallel.pipeline.schedule import (
    Action,
    ActionKind,
    Schedule,
    ScheduleError,
    dependencies,
    peak_activations,
)
from megalite.parallel.pipeline.send_recv_actions import (
    Channel,
    channel_of,
    receive_before,
    received_from,
    send_after,
)


def validate(schedule: Schedule, outstanding_sends: int | None = None) -> None:
    """Check a schedule that includes its communication.

    Args:
        outstanding_sends: number of sends that a rank may leave incomplete before its next action; 0 if sends
            block, None for no limit.

    Raises:
        ScheduleError: a check fails. The message contains the rank, the action and the reason.
    """
    _check_placement(schedule)
    for rank in range(schedule.ranks):
        _check_complete(schedule, rank)
        _check_order(schedule, rank)
        check_gathering(schedule, rank)
    _Execution(schedule, outstanding_sends).run()
    peaks = peak_activations(schedule, until=schedule.passes[-1])
    for rank, (peak, limit) in enumerate(zip(peaks, schedule.activation_limit, strict=True)):
        if peak > limit:
            raise ScheduleError(
                f"rank {rank} keeps up to {peak} activations in memory, more than the {limit} "
                f"that schedule {schedule.name} allows."
            )


def _check_placement(schedule: Schedule) -> None:
    if len(schedule.placement) != schedule.stages or set(schedule.placement) != set(range(schedule.ranks)):
        raise ScheduleError(
            f"Expected a placement that assigns a rank to each of {schedule.stages} stages and a "
            f"stage to each of {schedule.ranks} ranks, but got {schedule.placement}."
        )
    for what in ("actions", "activation_limit"):
        if len(getattr(schedule, what)) != schedule.ranks:
            raise ScheduleError(
                f"Expected {schedule.ranks} entries in {what}, one per rank, but got "
                f"{len(getattr(schedule, what))}."
            )


def _check_complete(schedule: Schedule, rank: int) -> None:
    """Check that the list has exactly the actions that the placement requires of this rank, once each."""
    compute = [
        Action(kind, stage, microbatch)
        for stage in schedule.stages_of(rank)
        for kind in schedule.passes
        for microbatch in range(schedule.microbatches)
    ]
    expected = set(compute)
    for action in compute:
        expected |= {
            other for other in (receive_before(action, schedule), send_after(action, schedule)) if other
        }
    counts = Counter(action for action in schedule.actions[rank] if action.bucket is None)
    for action, count in counts.items():
        if action not in expected:
            raise ScheduleError(
                f"rank {rank}: unexpected action {action}. Rank {rank} has stages {schedule.stages_of(rank)}."
            )
        if count > 1:
            raise ScheduleError(f"rank {rank}: {action} appears {count} times.")
    for action in sorted(expected - counts.keys()):
        raise ScheduleError(f"rank {rank}: {action} is missing.")


def _check_order(schedule: Schedule, rank: int) -> None:
    """Check that each action follows its dependencies on the same rank.

    Gradients must also be accumulated in ascending microbatch order.
    """
    seen: set[Action] = set()
    # number of completed gradient passes, by (pass, stage)
    accumulated: Counter[tuple[ActionKind, int]] = Counter()
    for action in schedule.actions[rank]:
        for needed in _needed_here(action, schedule, rank):
            if needed not in seen:
                raise ScheduleError(
                    f"rank {rank}: {action} is scheduled before {needed}, on which it depends."
                )
        if action.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT):
            if action.microbatch != accumulated[action.kind, action.stage]:
                raise ScheduleError(
                    f"rank {rank}: {action} is out of order, because gradients must be "
                    "accumulated in ascending order of microbatches."
                )
            accumulated[action.kind, action.stage] += 1
        seen.add(action)


def _needed_here(action: Action, schedule: Schedule, rank: int) -> list[Action]:
    """Return the actions that must precede an action in the list of its own rank."""
    if action.is_compute:
        receive = receive_before(action, schedule)
        local = [
            other
            for other in dependencies(action, schedule.stages)
            if schedule.placement[other.stage] == rank
        ]
        return [*local, receive] if receive else local
    if action.is_send:
        return [
            Action(
                ActionKind.FORWARD if action.kind is ActionKind.SEND_FORWARD else ActionKind.BACKWARD,
                action.stage,
                action.microbatch,
            )
        ]
    return []


class _Execution:
    """Execution of the lists of all ranks in one process.

    A queue for each (rank, channel) replaces the communicators.
    """

    def __init__(self, schedule: Schedule, outstanding_sends: int | None):
        self.schedule, self.outstanding_sends = schedule, outstanding_sends
        self.position = [0] * schedule.ranks
        self.queues: defaultdict[tuple[int, Channel], deque[Action]] = defaultdict(deque)
        self.sending = [0] * schedule.ranks
        self.received: set[tuple[int, Action]] = set()
        self.runnable = deque(range(schedule.ranks))

    def run(self) -> None:
        while self.runnable:
            rank = self.runnable.popleft()
            while self.position[rank] < len(self.schedule.actions[rank]) and self._obstacle(rank) is None:
                action = self.schedule.actions[rank][self.position[rank]]
                self.position[rank] += 1
                if action.is_message:
                    channel = channel_of(action, rank)
                    self.sending[rank] += action.is_send
                    self.queues[rank, channel].append(action)
                    self._complete(rank, channel)
        stuck = [
            rank for rank, actions in enumerate(self.schedule.actions) if self.position[rank] < len(actions)
        ]
        # if no rank is stuck, the channels are empty: every receive was needed by a compute action, so its
        # send has completed
        if stuck:
            reasons = (
                f"rank {rank} cannot start {self.schedule.actions[rank][self.position[rank]]} "
                f"({self._obstacle(rank)})"
                for rank in stuck
            )
            raise ScheduleError(f"deadlock: {'; '.join(reasons)}.")

    def _obstacle(self, rank: int) -> str | None:
        """Return the reason why the rank cannot execute its next action, or None if it can."""
        action = self.schedule.actions[rank][self.position[rank]]
        if self.outstanding_sends is not None and self.sending[rank] > self.outstanding_sends:
            return f"{self.sending[rank]} sends have not been received"
        receive = receive_before(action, self.schedule) if action.is_compute else None
        return f"{receive} has not completed" if receive and (rank, receive) not in self.received else None

    def _complete(self, rank: int, channel: Channel) -> None:
        """Complete all matching sends and receives at the heads of their queues, starting with this rank.

        Each of them may expose another.
        """
        touched = [rank]
        while touched:
            here = touched.pop()
            queue = self.queues[here, channel]
            there = queue[0].peer if queue else None
            if there is None or not self.queues[there, channel]:
                continue
            other = self.queues[there, channel][0]
            if other.peer != here or other.is_send == queue[0].is_send:
                continue
            sender, receiver = (here, there) if queue[0].is_send else (there, here)
            send, receive = self.queues[sender, channel].popleft(), self.queues[receiver, channel].popleft()
            produced = received_from(receive)
            if (send.stage, send.microbatch) != (produced.stage, produced.microbatch):
                raise ScheduleError(
                    f"rank {receiver}: {receive} would receive the data of {send} on rank "
                    f"{sender}, because their orders do not match."
                )
            self.received.add((receiver, receive))
            self.sending[sender] -= 1
            self.runnable += (sender, receiver)
            touched += (sender, receiver)
