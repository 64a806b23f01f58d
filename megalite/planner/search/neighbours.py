"""Layouts that differ from a given one in one choice, for a run that is to change little."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace

from megalite.config.schema import Config
from megalite.model.kinds import dispatch_of
from megalite.planner.search.best_first import Plan, Search
from megalite.planner.search.run_config import apply_layout, first_broken_rule
from megalite.planner.time.step import LayoutChoice

SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2))
"""Schedules to try, with the stages of a rank."""


def neighbours(base: Config, choice: LayoutChoice) -> Iterator[LayoutChoice]:
    """Yield the legal layouts of the same ranks that differ in one choice: a size doubled or halved, the
    micro-batch size, ZeRO, recomputation, offload or the schedule. dp takes the remaining ranks."""
    seen = {choice}
    for layout in _candidates(base, choice):
        if layout not in seen and first_broken_rule(apply_layout(base, layout), choice.gpus) is None:
            seen.add(layout)
            yield layout


def better(search: Search, choice: LayoutChoice, own: Plan | None) -> list[Plan]:
    """Return the neighbours of a layout that fit, and are faster if it fits itself, fastest first.

    Args:
        own: the plan of the layout; None if no run accepts it.
    """
    limit = own.step.total if own is not None and own.fits else float("inf")
    plans = [search.plan(layout) for layout in neighbours(search.base, choice)]
    return sorted(
        (plan for plan in plans if plan.fits and plan.step.total < limit), key=lambda plan: plan.step.total
    )


def differing(one: LayoutChoice, other: LayoutChoice) -> int:
    """Return the number of choices in which two layouts differ; dp follows from the others."""
    ours, theirs = asdict(one), asdict(other)
    return sum(ours[name] != theirs[name] for name in ours.keys() - {"dp", "sequence_parallel"})


def _candidates(base: Config, choice: LayoutChoice) -> Iterator[LayoutChoice]:
    for axis in ("tp", "pp", "cp"):
        for size in _near(getattr(choice, axis)):
            yield from _of_size(base, choice, axis, size)
    yield from (replace(choice, micro_batch_size=size) for size in _near(choice.micro_batch_size))
    if dispatch_of(base.model) is not None:
        yield from (replace(choice, ep=size) for size in _near(choice.ep))
    yield from (replace(choice, zero=zero, dp_shard=None) for zero in range(4))
    yield from (replace(choice, recompute=mode) for mode in ("none", "selective", "full"))
    yield from (replace(choice, offload=place, offload_parameters=False) for place in ("none", "cpu"))
    if choice.pp > 1:
        for schedule, stages in SCHEDULES:
            yield replace(choice, schedule=schedule, virtual_stages=stages)


def _near(size: int) -> list[int]:
    return [2 * size, size // 2] if size % 2 == 0 else [2 * size]


def _of_size(base: Config, choice: LayoutChoice, axis: str, size: int) -> Iterator[LayoutChoice]:
    sizes = {"tp": choice.tp, "pp": choice.pp, "cp": choice.cp, axis: size}
    dp, rest = divmod(choice.gpus, sizes["tp"] * sizes["pp"] * sizes["cp"])
    if rest or not dp:
        return
    changed = replace(choice, tp=sizes["tp"], pp=sizes["pp"], cp=sizes["cp"], dp=dp)
    if axis == "tp":
        even = choice.cp > 1 or base.data.sequence_length % size == 0
        changed = replace(changed, sequence_parallel=size > 1 and even)
    if axis == "pp" and min(size, choice.pp) == 1:
        changed = replace(changed, schedule="1f1b", virtual_stages=1)
    yield changed
