"""The passes of a pipeline rank at which its memory can be largest, whatever its stages keep.

What a rank holds during a pass is a sum over its stages: the microbatches between their forward and their
backward, times what one keeps, and those whose weight pass is to come, times what that needs. A pass can
therefore be the fullest only if no other pass of its kind and stage runs while at least as many microbatches
are held everywhere: a handful of hundreds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from operator import ge
from typing import TYPE_CHECKING, NamedTuple

from megalite.parallel.pipeline.schedule import ActionKind, Schedule

if TYPE_CHECKING:
    from megalite.planner.memory.activations import HeldBytes


class Moment(NamedTuple):
    """A forward or backward of a rank.

    Attributes:
        place: of its stage among those of the rank.
        held: for each stage, the microbatches between forward and backward, with that of a backward, without
            that of a forward.
        deferred: for each stage, those between backward and weight pass.
    """

    kind: ActionKind
    place: int
    held: tuple[int, ...]
    deferred: tuple[int, ...]

    def covers(self, other: Moment) -> bool:
        """Return whether this moment holds at least as much as another one of the same kind and stage."""
        return all(map(ge, self.held, other.held)) and all(map(ge, self.deferred, other.deferred))


def fullest(passes: Iterable[tuple[ActionKind, int]], stages: int, splits: bool) -> tuple[Moment, ...]:
    """Return the moments that no other moment covers.

    Args:
        passes: of a rank, in order, each with the place of its stage among `stages`.
        splits: whether backwards defer a weight pass.
    """
    held, deferred = [0] * stages, [0] * stages
    by_pass: dict[tuple[ActionKind, int], dict[Moment, None]] = {}
    for kind, place in passes:
        if kind is ActionKind.WEIGHT:
            deferred[place] -= 1
            continue
        by_pass.setdefault((kind, place), {})[Moment(kind, place, tuple(held), tuple(deferred))] = None
        held[place] += 1 if kind is ActionKind.FORWARD else -1
        deferred[place] += splits and kind is ActionKind.BACKWARD
    return tuple(moment for moments in by_pass.values() for moment in _uncovered(moments))


def _uncovered(moments: Iterable[Moment]) -> list[Moment]:
    kept: list[Moment] = []
    for moment in sorted(moments, key=lambda each: sum(each.held) + sum(each.deferred), reverse=True):
        if not any(other.covers(moment) for other in kept):
            kept.append(moment)
    return kept


@lru_cache(maxsize=4096)
def moments_of(schedule: Schedule, rank: int) -> tuple[Moment, ...]:
    """Return the moments of a rank of a schedule that no other moment covers."""
    own: Sequence[int] = schedule.stages_of(rank)
    place = {stage: index for index, stage in enumerate(own)}
    passes = [(action.kind, place[action.stage]) for action in schedule.compute(rank)]
    return fullest(passes, len(own), ActionKind.WEIGHT in schedule.passes)


class Load(NamedTuple):
    """Memory of a rank at one point of a pass, in bytes.

    Attributes:
        moment: the pass.
        boundary: the pass's microbatch is held by the units of its stage before this index only.
        activations: with what is recomputed and stashed at this point, and tables.
        logits: with the chunk whose loss is computed.
        workspace: temporaries of a unit's backward.
    """

    moment: Moment
    boundary: int
    activations: int
    logits: int
    workspace: int = 0

    @property
    def total(self) -> int:
        return self.activations + self.logits + self.workspace


def loads(moments: Iterable[Moment], stages: Sequence[Sequence[HeldBytes]], tables: int) -> Iterator[Load]:
    """Yield the memory of a rank after each unit's forward, and before and after each unit's backward.

    A forward adds what its units save, and a recomputed unit needs more until it ends. A backward goes
    through them in reverse: a recomputed unit temporarily needs more, then its saved bytes are freed, except
    what a weight pass needs.

    Args:
        stages: the units of each stage of the rank.
        tables: bytes that the rank holds all the time.
    """
    for moment in moments:
        activations, logits = tables, 0
        for units, held, deferred in zip(stages, moment.held, moment.deferred, strict=True):
            activations += sum(held * unit.saved + deferred * unit.stash for unit in units)
            logits += sum(held * unit.logits + deferred * unit.logits_stash for unit in units)
        units = stages[moment.place]
        if moment.kind is ActionKind.FORWARD:
            for index, unit in enumerate(units):
                if unit.recorded:
                    yield Load(moment, index, activations + unit.saved + unit.recorded, logits)
                activations, logits = activations + unit.saved, logits + unit.logits
                yield Load(moment, index + 1, activations, logits + unit.logits_chunk)
            continue
        for index, unit in reversed(list(enumerate(units))):
            recomputed = unit.recomputed + unit.stash_peak
            yield Load(moment, index, activations + recomputed, logits, unit.workspace)
            activations += unit.stash - unit.saved
            logits += unit.logits_stash - unit.logits
        yield Load(moment, 0, activations, logits)
