"""Builds a schedule from its name and sizes: the order of each rank, with weight passes in its gaps. Imports
no torch."""

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
        ScheduleError: the schedule is unknown, or has a fixed number that differs from virtual_stages.
    """
    if name not in RECIPES:
        raise ScheduleError(
            f"parallel.schedule = {name!r} is not a schedule. Choose one of: {', '.join(SCHEDULES)}."
        )
    own = fixed_stages(name)
    if virtual_stages is not None and (virtual_stages < 1 or own not in (None, virtual_stages)):
        legal = f"{name} has {own}: leave it out" if own else "give 1 or more"
        raise ScheduleError(f"parallel.virtual_stages = {virtual_stages}: {legal}.")
    return stages_per_rank(name, virtual_stages)


@lru_cache(maxsize=256)
def placement(name: str, ranks: int, virtual_stages: int | None = None) -> tuple[int, ...]:
    """The rank of each stage. Raises ScheduleError as `build` does."""
    return RECIPES[name].placement(ScheduleShape(ranks, 1, chunks_of(name, virtual_stages)))


def build(
    name: str,
    ranks: int,
    microbatches: int,
    virtual_stages: int | None = None,
    costs: Costs | None = None,
    forward_only: bool = False,
) -> Schedule:
    """The schedule of compute actions; `with_communication` adds the sends and receives.

    Args:
        virtual_stages: stages on each rank, for `interleaved` (default 2); the other schedules have a fixed
            number.
        costs: durations by which the weight passes of a split backward are placed (default: all passes equal,
            messages take no time).
        forward_only: keep only the forwards, in the same order, for evaluation.

    Raises:
        ScheduleError: the name is unknown, or a size is below 1 or does not belong to the schedule.
    """
    for what, size in (("parallel.pp", ranks), ("the number of microbatches of a step", microbatches)):
        if size < 1:
            raise ScheduleError(f"{what} = {size}: a pipeline needs at least 1.")
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
    """Keep only the forwards. The order stays valid, since a forward depends only on forwards."""
    actions = tuple(
        tuple(action for action in actions if action.kind is ActionKind.FORWARD)
        for actions in schedule.actions
    )
    return replace(
        schedule, actions=actions, activation_limit=(1,) * schedule.ranks, passes=(ActionKind.FORWARD,)
    )
