"""Which rank has computed wrong values: a pure function of the records of all passes.

The samples of a block of ranks are computed several times, in part by other blocks. The values on which most
blocks agree are right; if as many agree on others, those that were computed more often. If this does not
decide either, as if two blocks each repeat their own result, both are culprits.

In a pass with wrong values the difference spreads from rank to rank. The rank where it began has received
nothing wrong before: its first difference is something that it has sent, or gradients of its own. On all
other ranks it is something that they have received.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from megalite.parallel.recheck.pass_record import RECEIVED, Event

Block = tuple[int, ...]
"""Ranks that compute the same samples together. Ranks at one index of two blocks have the same weights."""


@dataclass(frozen=True)
class Pass:
    """One computation of all samples.

    Attributes:
        shift: block b computes the samples of block b - shift.
        records: the events of each rank of the world.
    """

    shift: int
    records: Sequence[tuple[Event, ...]]


class Culprit(NamedTuple):
    """A rank that has computed wrong values.

    Attributes:
        number: index of the pass.
        event: the first one that differs; None if it is missing.
    """

    rank: int
    number: int
    event: Event | None


@dataclass(frozen=True)
class Judgment:
    """The result of a comparison.

    Attributes:
        culprits: ranks with wrong values, each once; if not `decided`, all that may have them. Empty: all
            passes agree.
        decided: whether it is known which values are right.
        last_is_right: whether the last pass has the right values on every rank.
    """

    culprits: tuple[Culprit, ...]
    decided: bool
    last_is_right: bool


def judge(passes: Sequence[Pass], blocks: Sequence[Block]) -> Judgment:
    """Compare what the passes have computed from the same samples."""
    culprits: dict[int, Culprit] = {}
    decided = last_is_right = True
    for owner in range(len(blocks)):
        executors = [blocks[(owner + each.shift) % len(blocks)] for each in passes]
        groups: defaultdict[tuple[tuple[Event, ...], ...], list[int]] = defaultdict(list)
        for number, block in enumerate(executors):
            groups[tuple(passes[number].records[rank] for rank in block)].append(number)
        ordered = sorted(groups.values(), key=lambda group: _weight(group, executors), reverse=True)
        if len(ordered) == 1:
            continue
        tied = _weight(ordered[0], executors) == _weight(ordered[1], executors)
        decided &= not tied
        last_is_right &= not tied and len(passes) - 1 in ordered[0]
        for group in ordered if tied else ordered[1:]:
            right = ordered[1] if group is ordered[0] else ordered[0]
            for number in group:
                for culprit in _origins(passes, executors, number, right[0]):
                    culprits.setdefault(culprit.rank, culprit)
    return Judgment(tuple(culprits.values()), decided, last_is_right)


def _weight(group: Sequence[int], executors: Sequence[Block]) -> tuple[int, int]:
    """Return how many blocks have computed the values of some passes, and how often."""
    return len({executors[number] for number in group}), len(group)


def _origins(passes: Sequence[Pass], executors: Sequence[Block], wrong: int, right: int) -> list[Culprit]:
    """Return the ranks where the differences of a pass from the right one began.

    If each rank has received its first difference, a message has changed on its way: these are the receivers.
    """
    differing = [
        Culprit(rank, wrong, _first_difference(passes[wrong].records[rank], passes[right].records[other]))
        for rank, other in zip(executors[wrong], executors[right], strict=True)
        if passes[wrong].records[rank] != passes[right].records[other]
    ]
    return [each for each in differing if each.event is None or each.event.kind != RECEIVED] or differing


def _first_difference(events: Sequence[Event], others: Sequence[Event]) -> Event | None:
    return next(one for one, other in zip_longest(events, others) if one != other)
