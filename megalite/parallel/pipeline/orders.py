"""Order of the forwards and backwards on each rank, for every schedule.

Each order is a closed form of a few lines. If a schedule splits the backward, its weight passes are not
included: `weight_actions.py` inserts them into the gaps, which depend on the durations. The zero-bubble
schedules therefore need no generator of their own: zb-h1 is 1f1b, zb-h2 is 1f1b with more forwards at the
start, and zb-v is 1f1b on a model folded in two.

Forwards and backwards of a stage run in ascending microbatch order under every schedule, so that gradients
are added in the same order, bitwise.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import NamedTuple

from megalite.parallel.pipeline.schedule import Action, ActionKind

F, B = ActionKind.FORWARD, ActionKind.BACKWARD


class ScheduleShape(NamedTuple):
    """Sizes of a schedule.

    Attributes:
        ranks: size of the pipeline axis.
        microbatches: number of microbatches per step.
        chunks: number of stages on each rank.
    """

    ranks: int
    microbatches: int
    chunks: int


def looped(shape: ScheduleShape) -> tuple[int, ...]:
    """Return the rank of each stage in rounds over the ranks, where the last rank sends to the first."""
    return tuple(range(shape.ranks)) * shape.chunks


def folded(shape: ScheduleShape) -> tuple[int, ...]:
    """Return the rank of each stage in a V: up the ranks and back.

    Rank 0 has the first and the last stage.
    """
    there = tuple(range(shape.ranks))
    return there + there[::-1]


def gpipe(rank: int, shape: ScheduleShape) -> list[Action]:
    """GPipe (Huang et al. 2019): all forwards, then all backwards.

    The backwards are in ascending order, not mirrored as in the paper.
    """
    return [Action(kind, rank, i) for kind in (F, B) for i in range(shape.microbatches)]


def alternating(forwards: list[Action], backwards: list[Action], warmup: int) -> list[Action]:
    """Return `warmup` forwards, then alternating forwards and backwards, then the remaining backwards."""
    steady = chain.from_iterable(zip(forwards[warmup:], backwards, strict=False))
    return [*forwards[:warmup], *steady, *backwards[max(0, len(forwards) - warmup) :]]


def one_f_one_b(rank: int, shape: ScheduleShape) -> list[Action]:
    """1F1B (Narayanan et al. 2019): warm up, alternate, drain.

    Stage s of p keeps at most p - s activations.
    """
    return _ahead(rank, shape, shape.ranks - rank - 1)


def zb_h2(rank: int, shape: ScheduleShape) -> list[Action]:
    """ZB-H2 (Qi et al. 2023): 2(p - s) - 1 forwards in flight.

    These are enough to compute until the gradient of the first microbatch returns.
    """
    return _ahead(rank, shape, 2 * (shape.ranks - rank - 1))


def _ahead(rank: int, shape: ScheduleShape, warmup: int) -> list[Action]:
    forwards, backwards = ([Action(kind, rank, i) for i in range(shape.microbatches)] for kind in (F, B))
    return alternating(forwards, backwards, min(warmup, shape.microbatches))


def groups(shape: ScheduleShape) -> list[range]:
    """Return groups of microbatches that pass through one chunk after the other.

    A group of fewer than p leaves ranks idle at every change of chunk. There are therefore floor(m / p)
    groups, at least one, with sizes as equal as possible, larger ones first.
    """
    count = max(1, shape.microbatches // shape.ranks)
    size, rest = divmod(shape.microbatches, count)
    starts = [size * group + min(group, rest) for group in range(count + 1)]
    return [range(start, stop) for start, stop in zip(starts, starts[1:], strict=False)]


def interleaved_warmup(rank: int, shape: ScheduleShape) -> int:
    """Return the number of forwards before the first backward (Narayanan et al. 2021).

    These are the forwards of a group in all chunks except the last, and two for each following rank, for the
    way down and back up the ranks. With one chunk the way down is sufficient, as in 1F1B.
    """
    ways, largest = 2 if shape.chunks > 1 else 1, len(groups(shape)[0])
    return min(
        ways * (shape.ranks - rank - 1) + (shape.chunks - 1) * largest, shape.microbatches * shape.chunks
    )


def interleaved(rank: int, shape: ScheduleShape) -> list[Action]:
    """Interleaved 1F1B (Narayanan et al. 2021): group by group, and within a group chunk by chunk.

    Chunks are in ascending order in forward and in descending order in backward.
    """
    chunks = range(shape.chunks)
    forwards = [
        Action(F, chunk * shape.ranks + rank, i) for group in groups(shape) for chunk in chunks for i in group
    ]
    backwards = [
        Action(B, chunk * shape.ranks + rank, i)
        for group in groups(shape)
        for chunk in reversed(chunks)
        for i in group
    ]
    return alternating(forwards, backwards, interleaved_warmup(rank, shape))


class _Folded:
    """Builder of a rank's order on the V, with a downward and an upward stage.

    Each pass is executed once for every microbatch.
    """

    def __init__(self, rank: int, shape: ScheduleShape):
        self.down, self.up = rank, 2 * shape.ranks - 1 - rank
        self.actions: list[Action] = []
        self._next = {(kind, stage): 0 for kind in (F, B) for stage in (self.down, self.up)}
        self._microbatches = shape.microbatches

    def put(self, *wanted: tuple[ActionKind, int]) -> None:
        """Append each (kind, stage) for its next microbatch.

        A pass is skipped if no microbatch is left or, for a backward, its forward has not been executed.
        """
        for kind, stage in wanted:
            microbatch = self._next[kind, stage]
            limit = self._microbatches if kind is F else self._next[F, stage]
            if microbatch < limit:
                self.actions.append(Action(kind, stage, microbatch))
                self._next[kind, stage] += 1


def zb_v(rank: int, shape: ScheduleShape) -> list[Action]:
    """ZB-V (Qi et al. 2023).

    Downward forwards until the first microbatch is back, then both halves alternately.
    """
    order = _Folded(rank, shape)
    order.put(*[(F, order.down)] * (2 * (shape.ranks - rank) - 1))
    order.put(*[(F, order.up), (F, order.down)] * rank)
    order.put(*[(F, order.up), (B, order.up)] * (shape.ranks - rank))
    while len(order.actions) < 4 * shape.microbatches:
        order.put((F, order.down), (B, order.down), (F, order.up), (B, order.up))
    return order.actions


def v_half(rank: int, shape: ScheduleShape) -> list[Action]:
    """V-Half (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory").

    The pattern of one microbatch is repeated every six passes. From rank to rank, downward forwards and
    upward backwards start two passes later, the other two one pass later. Modulo three, the first two then
    never coincide with the other two on any rank; within each pair the start times differ by three modulo
    six. The activations of a microbatch are kept for about 3p passes of a stage in total, half as long as
    under 1F1B.
    """
    p, period = shape.ranks, 6

    def at_least(time: int, residue: int) -> int:
        return time + (residue - time) % period

    forward_up = 2 * (p - 1) + 1  # on the last rank, which continues with its upward stage at once
    backward_up = at_least(forward_up + p, 3)  # on rank 0
    backward_down = at_least(backward_up + 2 * (p - 1) + 1, forward_up + 3)  # on the last rank
    down, up = rank, 2 * p - 1 - rank
    times = {
        (F, down): 2 * rank,
        (F, up): forward_up + p - 1 - rank,
        (B, up): backward_up + 2 * rank,
        (B, down): backward_down + p - 1 - rank,
    }
    placed = [
        (time + period * i, Action(*what, i))
        for what, time in times.items()
        for i in range(shape.microbatches)
    ]
    return [action for _, action in sorted(placed)]


class Recipe(NamedTuple):
    """Parts that define a schedule.

    Attributes:
        order: a rank's forwards and backwards, in order.
        activations: maximum number of (stage, microbatch) activations that a rank keeps at once.
        placement: the rank of each stage.
        splits: whether the backward is split into an input and a weight pass.
        staggered: whether ranks finish one after the other, so that a rank that does not wait for others can
            begin the next step earlier.
    """

    order: Callable[[int, ScheduleShape], list[Action]]
    activations: Callable[[int, ScheduleShape], int]
    placement: Callable[[ScheduleShape], tuple[int, ...]] = looped
    splits: bool = False
    staggered: bool = False


RECIPES = {
    "gpipe": Recipe(gpipe, lambda rank, shape: shape.microbatches),
    "1f1b": Recipe(one_f_one_b, lambda rank, shape: shape.ranks - rank),
    "interleaved": Recipe(interleaved, lambda rank, shape: interleaved_warmup(rank, shape) + 1),
    "zb-h1": Recipe(one_f_one_b, lambda rank, shape: shape.ranks, splits=True),
    "zb-h2": Recipe(zb_h2, lambda rank, shape: 2 * shape.ranks - 1, splits=True, staggered=True),
    "zb-v": Recipe(zb_v, lambda rank, shape: 2 * shape.ranks, folded, splits=True, staggered=True),
    "v-half": Recipe(v_half, lambda rank, shape: shape.ranks + 2, folded, splits=True),
}
"""All schedules by name. `generator.build` caps the activation limits at microbatches × chunks."""
