"""Which results to keep: an exact solution of the integer programme that `planning.budget` states. Imports no torch.

Every kind has a number of equal items (layers), and each item takes one of the kind's options: to keep everything, which costs nothing, or
an option that costs some time and frees some bytes of every constraint. Wanted is the choice of least cost that frees at least what each
constraint needs: a covering knapsack with alternatives.

Kinds are decided one after the other, and after each only those partial choices are followed on that can still become the best: which
another one does not dominate (at most its cost, and nothing more left to free), and whose lower bound is below the cost of the best choice
known. The bound is that of the linear relaxation, for each constraint by itself.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple


class Option(NamedTuple):
    """A way of treating one item: its cost, and what it frees of each constraint."""

    cost: float
    frees: tuple[int, ...]


class Kind(NamedTuple):
    """`count` equal items, and the options besides keeping everything."""

    count: int
    options: tuple[Option, ...]


Counts = tuple[tuple[int, ...], ...]
"""For each kind, the number of items that take each of its options."""


class _State(NamedTuple):
    """A choice for the kinds so far: its cost, what is left to free, and the counts, the last kind's first."""

    cost: float
    left: tuple[int, ...]
    counts: tuple[tuple[int, ...], ...]


def solve(kinds: Sequence[Kind], needs: Sequence[int]) -> Counts | None:
    """The choice of least cost that frees what every constraint needs; None if there is none."""
    wanted = [index for index, need in enumerate(needs) if need > 0]
    if not wanted:
        return tuple((0,) * len(kind.options) for kind in kinds)
    narrow = [Kind(kind.count, tuple(Option(each.cost, tuple(each.frees[i] for i in wanted)) for each in kind.options)) for kind in kinds]
    need = tuple(needs[index] for index in wanted)
    bounds = [_Bound(narrow[first:], len(need)) for first in range(len(narrow) + 1)]
    best = _greedy(narrow, need)
    states = [_State(0.0, need, ())]
    for number, kind in enumerate(narrow):
        limit = math.inf if best is None else best.cost
        after, expanded = bounds[number + 1], []
        for state in states:
            for taken in _counts(kind, state.left):
                left, cost = _left(kind, taken, state.left), state.cost + _cost(kind, taken)
                if cost + after.least(left) < limit * (1 - 1e-12):
                    expanded.append(_State(cost, left, (taken, *state.counts)))
        states = _undominated(expanded)
    complete = [state for state in states if not any(state.left)]
    if complete and (best is None or min(complete).cost < best.cost):
        best = min(complete)
    return None if best is None else tuple(reversed(best.counts))


def _cost(kind: Kind, taken: Sequence[int]) -> float:
    return sum(count * option.cost for count, option in zip(taken, kind.options, strict=True))


def _left(kind: Kind, taken: Sequence[int], left: Sequence[int]) -> tuple[int, ...]:
    freed = [sum(count * option.frees[i] for count, option in zip(taken, kind.options, strict=True)) for i in range(len(left))]
    return tuple(max(need - found, 0) for need, found in zip(left, freed, strict=True))


def _counts(kind: Kind, left: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Numbers of items for each option; of an only option no more than any constraint has a use for."""
    if len(kind.options) == 1:
        frees = kind.options[0].frees
        useful = max((-(-need // freed) for need, freed in zip(left, frees, strict=True) if freed > 0), default=0)
        yield from ((count,) for count in range(min(kind.count, useful) + 1))
        return

    def shared(options: int, items: int) -> Iterator[tuple[int, ...]]:
        if options == 0:
            yield ()
            return
        for count in range(items + 1):
            for others in shared(options - 1, items - count):
                yield (count, *others)

    yield from shared(len(kind.options), kind.count)


def _undominated(states: list[_State]) -> list[_State]:
    """States without those that cost no less than another one which leaves no more of any constraint."""
    kept: list[_State] = []
    for state in sorted(states):
        if not any(all(a <= b for a, b in zip(other.left, state.left, strict=True)) for other in reversed(kept)):
            kept.append(state)
    return kept


@dataclass(frozen=True)
class _Step:
    """A part of the linear relaxation: so many bytes at so much cost for each."""

    rate: float
    frees: int


class _Bound:
    """The least cost at which some kinds free a number of bytes, constraint by constraint, with fractions of items."""

    def __init__(self, kinds: Sequence[Kind], constraints: int):
        self._freed: list[list[int]] = []
        self._costs: list[list[float]] = []
        self._rates: list[list[float]] = []
        for index in range(constraints):
            steps = sorted((step for kind in kinds for step in _hull(kind, index)), key=lambda step: step.rate)
            self._freed.append(list(accumulate((step.frees for step in steps), initial=0)))
            self._costs.append(list(accumulate((step.frees * step.rate for step in steps), initial=0.0)))
            self._rates.append([step.rate for step in steps])

    def least(self, left: Sequence[int]) -> float:
        """A lower bound of the cost of freeing what is left; infinite if it can not be freed."""
        return max(map(self._of_one, range(len(left)), left))

    def _of_one(self, index: int, need: int) -> float:
        freed = self._freed[index]
        if need <= 0:
            return 0.0
        if need > freed[-1]:
            return math.inf
        step = bisect_left(freed, need) - 1
        return self._costs[index][step] + (need - freed[step]) * self._rates[index][step]


def _hull(kind: Kind, index: int) -> list[_Step]:
    """The lower convex hull of a kind's options for one constraint, from keeping everything on."""
    points, at, steps = [(option.frees[index], option.cost) for option in kind.options], (0, 0.0), list[_Step]()
    while further := [point for point in points if point[0] > at[0]]:
        start = at
        rate, frees, cost = min(((cost - start[1]) / (frees - start[0]), -frees, cost) for frees, cost in further)
        steps.append(_Step(max(rate, 0.0), kind.count * (-frees - start[0])))
        at = (-frees, cost)
    return steps


def _greedy(kinds: Sequence[Kind], needs: tuple[int, ...]) -> _State | None:
    """A good choice: items one by one, the cheapest for what is still needed, then all that turn out to be needless taken back."""
    taken = [[0] * len(kind.options) for kind in kinds]
    left = list(needs)

    def gain(kind: int, option: int, previous: int | None) -> tuple[float, float]:
        """Additional cost, and what is freed of what is left, as shares of the need."""
        new, old = kinds[kind].options[option], None if previous is None else kinds[kind].options[previous]
        cost = new.cost - (0.0 if old is None else old.cost)
        freed = [each - (0 if old is None else old.frees[i]) for i, each in enumerate(new.frees)]
        return cost, sum((max(b, 0) - max(b - a, 0)) / need for a, b, need in zip(freed, left, needs, strict=True))

    while any(need > 0 for need in left):
        moves = []
        for number, kind in enumerate(kinds):
            for option in range(len(kind.options)):
                sources: list[int | None] = [None] if sum(taken[number]) < kind.count else []
                sources += [other for other in range(len(kind.options)) if other != option and taken[number][other]]
                for source in sources:
                    cost, freed = gain(number, option, source)
                    if freed > 0:
                        moves.append((max(cost, 0.0) / freed, number, option, -1 if source is None else source))
        if not moves:
            return None
        _, number, option, source = min(moves)
        kind = kinds[number]
        taken[number][option] += 1
        if source >= 0:
            taken[number][source] -= 1
        for i in range(len(left)):
            left[i] -= kind.options[option].frees[i] - (kind.options[source].frees[i] if source >= 0 else 0)
    _take_back(kinds, taken, left)
    counts = tuple(tuple(each) for each in reversed(taken))
    return _State(sum(_cost(kind, each) for kind, each in zip(kinds, taken, strict=True)), (0,) * len(needs), counts)


def _take_back(kinds: Sequence[Kind], taken: list[list[int]], left: list[int]) -> None:
    """Keep everything again in items that are not needed, the costly ones first."""
    every = [(option.cost, number, index) for number, kind in enumerate(kinds) for index, option in enumerate(kind.options)]
    for _, number, index in sorted(every, reverse=True):
        frees = kinds[number].options[index].frees
        while taken[number][index] and all(need + freed <= 0 for need, freed in zip(left, frees, strict=True)):
            taken[number][index] -= 1
            for i, freed in enumerate(frees):
                left[i] += freed
