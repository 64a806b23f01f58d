"""Construction of a schedule from its name and sizes.

It combines the order of each rank with weight passes in its gaps. This module does not import torch.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from megalite.config.dims import fixed_stages, stages_per_rank
from megalite.parallel.pipeline.orders import RECIPES, ScheduleShape
from megalite.parallel.pipeline.schedule import ActionKind, Costs, Schedule, ScheduleError
from megalite.parallel.pipeline.weight_actions import with_weight_passes

SCHEDULES = tuple(RECIPES)


def chunks_of(name: str, virtual_stages: int | None = None) -> int:
    """Return the number of stages per rank, see `stages_per_rank`.

    Raises:
        ScheduleError: the schedule is unknown, or requires a number that differs from virtual_stages.
    """
    if name not in RECIPES:
        raise ScheduleError(
            f"Unknown schedule: parallel.schedule={name!r}. Choose one of: {', '.join(SCHEDULES)}."
        )
    own = fixed_stages(name)
    if virtual_stages is not None and (virtual_stages < 1 or own not in (None, virtual_stages)):
        legal = f"{name} requires {own}. Leave it unset" if own else "it must be at least 1"
        raise ScheduleError(f"Invalid value parallel.virtual_stages={virtual_stages}: {legal}.")
    return stages_per_rank(name, virtual_stages)


@lru_cache(maxsize=256)
def placement(name: str, ranks: int, virtual_stages: int | None = None) -> tuple[int, ...]:
    """Return the rank of each stage. Raises ScheduleError like `build`."""
    return RECIPES[name].placement(ScheduleShape(ranks, 1, chunks_of(name, virtual_stages)))


def build(
    name: str,
    ranks: int,
    microbatches: int,
    virtual_stages: int | None = None,
    costs: Costs | None = None,
    forward_only: bool = False,
) -> Schedule:
    """Build the schedule of compute actions, to which `with_communication` adds sends and receives.

    Args:
        virtual_stages: stages on each rank, for `interleaved` (default 2); the other schedules have a fixed
            number.
        costs: durations that determine where weight passes of a split backward are placed (default: all
            passes equal, messages take no time).
        forward_only: keep only the forwards, in the same order, for evaluation.

    Raises:
        ScheduleError: the name is unknown, or a size is below 1 or not supported by the schedule.
    """
    for what, size in (("parallel.pp", ranks), ("the number of microbatches per step", microbatches)):
        if size < 1:
            raise ScheduleError(f"{what} must be at least 1, got {size}.")
    shape = ScheduleShape(ranks, microbatches, chunks_of(name, virtual_stages))
    recipe = RECIPES[name]
    actions = tuple(tuple(recipe.order(rank, shape)) for rank in range(ranks))
    limit = tuple(min(recipe.activations(rank, shape), microbatches * shape.chunks) for rank in range(ranks))
    schedule = Schedule(
        name, ranks, ranks * shape.chunks, microbatches, recipe.placement(shape), actions, limit
    )
    if forward_only:
        return _forward_only(schedule)
    return with_weight_passes(schedule, costs or Costs()) if recipe.splits else schedule


def _forward_only(schedule: Schedule) -> Schedule:
    """Remove all actions except forwards.

    The order stays valid, because a forward depends only on forwards.
    """
    actions = tuple(
        tuple(action for action in actions if action.kind is ActionKind.FORWARD)
        for actions in schedule.actions
    )
    return replace(
        schedule, actions=actions, activation_limit=(1,) * schedule.ranks, passes=(ActionKind.FORWARD,)
    )
