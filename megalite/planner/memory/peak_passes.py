"""The passes of a pipeline rank at which its memory can be largest, whatever its stages keep.

What a rank holds during a pass is a sum over its stages: the microbatches between their forward and their
backward, times what one keeps, and those whose weight pass is to come, times what that needs. A pass can
therefore be the fullest only if no other pass of its kind and stage runs while at least as many microbatches
are held everywhere: a handful of hundreds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from operator import ge
from typing import NamedTuple

from megalite.parallel.pipeline.schedule import ActionKind, Schedule


class Moment(NamedTuple):
    """A forward or backward of a rank.

    Attributes:
        place: of its stage among those of the rank.
        held: for each stage, the microbatches between forward and backward, with that of a backward, without
        that of a forward. deferred: for each stage, those between backward and weight pass.
    """

    kind: ActionKind
    place: int
    held: tuple[int, ...]
    deferred: tuple[int, ...]

    def covers(self, other: Moment) -> bool:
        """Whether this one holds at least as much as another of the same kind and stage."""
        return all(map(ge, self.held, other.held)) and all(map(ge, self.deferred, other.deferred))


def fullest(passes: Iterable[tuple[ActionKind, int]], stages: int, splits: bool) -> tuple[Moment, ...]:
    """The moments that no other one covers, given the passes of a rank in order, each with the place of its
    stage among `stages`.

    splits: whether backwards defer a weight pass.
    """
    held, deferred = [0] * stages, [0] * stages
    found: dict[tuple[ActionKind, int], dict[Moment, None]] = {}
    for kind, place in passes:
        if kind is ActionKind.WEIGHT:
            deferred[place] -= 1
            continue
        found.setdefault((kind, place), {})[Moment(kind, place, tuple(held), tuple(deferred))] = None
        held[place] += 1 if kind is ActionKind.FORWARD else -1
        deferred[place] += splits and kind is ActionKind.BACKWARD
    return tuple(moment for moments in found.values() for moment in _uncovered(moments))


def _uncovered(moments: Iterable[Moment]) -> list[Moment]:
    kept: list[Moment] = []
    for moment in sorted(moments, key=lambda each: sum(each.held) + sum(each.deferred), reverse=True):
        if not any(other.covers(moment) for other in kept):
            kept.append(moment)
    return kept


@lru_cache(maxsize=4096)
def moments_of(schedule: Schedule, rank: int) -> tuple[Moment, ...]:
    """The moments of a rank of a schedule."""
    own: Sequence[int] = schedule.stages_of(rank)
    place = {stage: index for index, stage in enumerate(own)}
    passes = [(action.kind, place[action.stage]) for action in schedule.compute(rank)]
    return fullest(passes, len(own), ActionKind.WEIGHT in schedule.passes)
