"""Insertion of gathers and reshards of weights into a schedule (ZeRO-3; Rajbhandari et al. 2020).

`sharding.weight_gatherer` executes them. This module does not import torch.

A rank keeps a shard of each bucket of weights. The buckets of a unit of the model are all-gathered over data
parallelism before the unit computes, and freed afterwards. The list of actions determines the next unit, so
that its buckets are gathered while the current one computes, and a bucket that the next unit also needs is
not freed. At most the buckets of two units are gathered at a time. With `keep` nothing is freed before the
end of the step: each bucket is gathered once per step instead of once per use, and all weights stay in
memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from megalite.parallel.pipeline.schedule import Action, ActionKind, Schedule, ScheduleError, Unit


def uses(action: Action, schedule: Schedule) -> Sequence[Unit]:
    """Return the units whose gathered weights a compute action needs, in order of computation."""
    # a weight gradient only requires inputs and output gradients
    if not schedule.units or action.kind is ActionKind.WEIGHT:
        return ()
    units = schedule.units[action.stage]
    if action.kind is ActionKind.FORWARD:
        return units
    # the backward of an embedding does not need weights
    return [unit for unit in reversed(units) if unit.number > 0]


def with_gathering(schedule: Schedule, units: tuple[tuple[Unit, ...], ...], keep: bool = False) -> Schedule:
    """Insert gathers and reshards, each before the compute action during which it is executed.

    Args:
        units: for each stage, its units, first to last.
        keep: insert no reshards; the gatherer frees all weights when the shards change or the next run
            begins.
    """
    known = replace(schedule, units=units)
    return replace(known, actions=tuple(_rank_actions(known, rank, keep) for rank in range(schedule.ranks)))


def _rank_actions(schedule: Schedule, rank: int, keep: bool) -> tuple[Action, ...]:
    used = [(action, unit) for action in schedule.compute(rank) for unit in uses(action, schedule)]
    moves: defaultdict[Action, list[Action]] = defaultdict(list)
    whole: set[int] = set()

    def gather(action: Action, wanted: Unit, during: int | None) -> None:
        missing = [bucket for bucket in wanted.buckets if bucket not in whole]
        moves[action] += [
            Action(ActionKind.GATHER, action.stage, action.microbatch, None, bucket, during)
            for bucket in missing
        ]
        whole.update(missing)

    if used:
        gather(*used[0], None)
    for place, (action, unit) in enumerate(used):
        following = used[place + 1][1] if place + 1 < len(used) else Unit(-1, ())
        gather(action, following, unit.number)
        if not keep:
            done = [bucket for bucket in unit.buckets if bucket not in following.buckets]
            moves[action] += [
                Action(ActionKind.RESHARD, action.stage, action.microbatch, None, bucket, unit.number)
                for bucket in done
            ]
            whole.difference_update(done)
    return tuple(each for action in schedule.actions[rank] for each in (*moves.get(action, ()), action))


def check_gathering(schedule: Schedule, rank: int) -> int:
    """Replay a rank's gathers and reshards as the runtime executes them.

    Returns:
        the maximum number of buckets that are gathered at once.

    Raises:
        ScheduleError: a unit computes with a bucket that is not gathered, or a bucket is gathered or freed
            twice.
    """
    whole: set[int] = set()
    announced: defaultdict[tuple[ActionKind, int | None], list[Action]] = defaultdict(list)
    most = 0

    def carry_out(kind: ActionKind, unit: int | None) -> None:
        for move in announced.pop((kind, unit), ()):
            assert move.bucket is not None
            if (move.bucket in whole) == (kind is ActionKind.GATHER):
                state = "is already gathered" if move.bucket in whole else "is not gathered"
                raise ScheduleError(f"rank {rank}: {move} is executed while bucket {move.bucket} {state}.")
            whole.symmetric_difference_update({move.bucket})

    for action in schedule.actions[rank]:
        if action.bucket is not None:
            announced[action.kind, action.unit].append(action)
            carry_out(action.kind, None)
        for unit in uses(action, schedule) if action.is_compute else ():
            if lacking := sorted(set(unit.buckets) - whole):
                raise ScheduleError(
                    f"rank {rank}: {action} uses unit {unit.number}, but its bucket {lacking[0]} "
                    "is not gathered."
                )
            carry_out(ActionKind.GATHER, unit.number)
            most = max(most, len(whole))
            carry_out(ActionKind.RESHARD, unit.number)
        if action.is_compute and announced:
            raise ScheduleError(
                f"rank {rank}: {next(iter(announced.values()))[0]} is never executed, because "
                f"{action} does not use its unit."
            )
    return most
