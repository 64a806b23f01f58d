"""Which results to keep: a solution of the integer programme that `planner.budget` states.

Every kind has a number of equal items (layers), and each item takes one of the kind's options: to keep
everything, which costs nothing, or an option that costs some time and frees some bytes of every constraint.
Wanted is the choice of least cost that frees at least what each constraint needs: a covering knapsack with
alternatives.

Kinds are decided one after the other, and after each only those partial choices are followed on that can
still become the best: which another one does not dominate (at most its cost, and nothing more left to free),
and whose lower bound is below the cost of the best choice known. The bound is that of the linear relaxation,
for each constraint by itself.

That is exact, and fast for a few kinds or constraints. A rank with dozens of virtual stages has hundreds of
both, all nearly alike, and proving the last thousandth takes minutes: such programmes are solved by HiGHS, to
within `GAP` of the least cost.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import comb
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
MOST_FOLLOWED = 300_000  # partial choices that are compared, times constraints; more take longer than HiGHS
GAP = 0.005  # of the cost of recomputation, which is a small part of a step
MOST_NODES = 50  # of HiGHS's tree; it needs a few, and its best choice until then is taken
BLOCK = 256  # choices that are compared at a time
SLACK = 2e-6  # relative, by which HiGHS may miss a constraint: twice its tolerance


class Option(NamedTuple):
    """One option for an item: its cost, and what it frees of each constraint."""

    cost: float
    frees: tuple[int, ...]


class ItemGroup(NamedTuple):
    """Identical items with the same options for freeing memory."""

    items: int
    options: tuple[Option, ...]


Counts = tuple[tuple[int, ...], ...]
"""For each kind, the number of items that take each of its options."""


class _States(NamedTuple):
    """Choices for the kinds so far, one in a row: costs, what is left to free of each constraint, the choice
    before, and the counts."""

    costs: Array
    left: Array  # [states, constraints]
    parents: Array
    taken: Array  # index into the last kind's possible counts


def solve(kinds: Sequence[ItemGroup], needs: Sequence[int], exact: bool = True) -> Counts | None:
    """Return the cheapest choice that frees what every constraint needs; None if there is none.

    For a large program the cost is within `GAP` of the optimum.

    Args:
        exact: False takes a good choice, and is fast.
    """
    wanted = [index for index, need in enumerate(needs) if need > 0]
    if not wanted:
        return tuple((0,) * len(kind.options) for kind in kinds)
    narrow = [
        ItemGroup(
            kind.items,
            tuple(Option(each.cost, tuple(each.frees[i] for i in wanted)) for each in kind.options),
        )
        for kind in kinds
    ]
    need = tuple(needs[index] for index in wanted)
    known = _greedy(narrow, need)
    if known is not None and not exact:
        return known
    limit = math.inf if known is None else sum(map(_cost, narrow, known)) * (1 - 1e-12)
    bounds = _Bounds(narrow, len(need))
    levels = [
        _States(
            np.zeros(1),
            np.array([need], dtype=np.int64),
            np.zeros(1, dtype=np.int64),
            np.zeros(1, dtype=np.int64),
        )
    ]
    possible: list[list[tuple[int, ...]]] = []
    followed = 0
    for number, kind in enumerate(narrow):
        followed += len(levels[-1].costs) * comb(kind.items + len(kind.options), kind.items) * len(need)
        if followed > MOST_FOLLOWED:
            return _branched(narrow, need, known)
        possible.append(list(_counts(kind)))
        levels.append(_followed(levels[-1], kind, possible[-1], bounds.after(number), limit))
        if not len(levels[-1].costs):
            return known
    last = levels[-1]
    complete = np.flatnonzero(~last.left.any(axis=1))
    if not len(complete):
        return known
    at, counts = complete[np.argmin(last.costs[complete])], list[tuple[int, ...]]()
    for level, choices in zip(reversed(levels), reversed(possible), strict=False):
        counts.append(choices[level.taken[at]])
        at = level.parents[at]
    return tuple(reversed(counts))


def _branched(kinds: Sequence[ItemGroup], needs: tuple[int, ...], known: Counts | None) -> Counts | None:
    """Return the choice that HiGHS finds by branch and cut, or the known one if it is cheaper."""
    from scipy.optimize import Bounds, LinearConstraint, milp  # here: importing it takes a third of a second

    options = [option for kind in kinds for option in kind.options]
    first = [0, *accumulate(len(kind.options) for kind in kinds)]
    frees = np.array(
        [[freed / need for freed, need in zip(option.frees, needs, strict=True)] for option in options]
    ).T
    taken = np.zeros((len(kinds), len(options)))
    for row, (start, stop) in enumerate(zip(first, first[1:], strict=False)):
        taken[row, start:stop] = 1
    costs = np.array([option.cost for option in options])
    limits = (
        LinearConstraint(frees, 1 + SLACK, np.inf),
        LinearConstraint(taken, -np.inf, [kind.items for kind in kinds]),
    )
    with _silenced():
        result = milp(
            costs / max(costs.max(), 1e-30),
            constraints=limits,
            integrality=np.ones(len(options)),
            bounds=Bounds(0, np.inf),
            # presolving takes longer than it saves
            options={"mip_rel_gap": GAP, "node_limit": MOST_NODES, "presolve": False},
        )
    if result.x is None:
        return known
    counts = [round(count) for count in result.x]
    chosen = tuple(tuple(counts[start:stop]) for start, stop in zip(first, first[1:], strict=False))
    frees_enough = all(
        sum(count * option.frees[index] for count, option in zip(counts, options, strict=True)) >= need
        for index, need in enumerate(needs)
    )
    if not frees_enough or (
        known is not None and sum(map(_cost, kinds, known)) <= sum(map(_cost, kinds, chosen))
    ):
        return known
    return chosen


@contextmanager
def _silenced() -> Iterator[None]:
    """Discard the output of C code on stdout.

    HiGHS prints a debugging line, which would otherwise be mixed with the output of --json.
    """
    flush = ctypes.CDLL(None).fflush  # its buffer is written when it is full, or at exit
    sys.stdout.flush()
    flush(None)
    own, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        flush(None)
        os.dup2(own, 1)
        os.close(own)
        os.close(nowhere)


class Relaxation:
    """A lower bound of the least cost at which items free a number of bytes of one constraint: fractions of
    items may take an option."""

    def __init__(self, kinds: Sequence[ItemGroup]):
        self._bound = _Bounds(kinds, 1).after(-1)

    def least(self, need: float) -> float:
        """Return the least cost that frees `need` bytes; infinity if the items cannot free that much."""
        return float(self._bound.least(np.array([need])))


def _followed(
    states: _States, kind: ItemGroup, possible: Sequence[tuple[int, ...]], after: _Bound, limit: float
) -> _States:
    """Return the states after one more kind that can still become the best choice."""
    choices = np.array(possible, dtype=np.int64)  # [counts, options]
    # [counts, constraints]
    frees = choices @ np.array([option.frees for option in kind.options], dtype=np.int64)
    costs = states.costs[:, None] + choices @ np.array([option.cost for option in kind.options])
    left = np.maximum(states.left[:, None, :] - frees, 0)  # [states, counts, constraints]
    parents, taken = np.nonzero(costs + after.least(left) < limit)
    extended = _States(costs[parents, taken], left[parents, taken], parents, taken)
    order = np.lexsort((*extended.left.T, extended.costs))
    kept = order[_undominated(extended.left[order])]
    return _States(*(each[kept] for each in extended))


def _undominated(left: Array) -> Array:
    """Return the indices of rows that no earlier row dominates.

    Rows are in the order of their cost. One dominates another if it leaves no more of any constraint.
    """
    if left.shape[1] == 1:
        before = np.minimum.accumulate(np.concatenate(([np.iinfo(np.int64).max], left[:-1, 0])))
        return np.flatnonzero(left[:, 0] < before[: len(left)])
    kept = np.zeros(0, dtype=np.int64)
    for start in range(0, len(left), BLOCK):
        block = np.arange(start, min(start + BLOCK, len(left)))
        others = np.concatenate((kept, block))
        covers = others[:, None] < block  # [others, block]
        for column in left.T:
            covers &= column[others, None] <= column[block]
        kept = np.concatenate((kept, block[~covers.any(axis=0)]))
    return kept


def _cost(kind: ItemGroup, taken: Sequence[int]) -> float:
    return sum(count * option.cost for count, option in zip(taken, kind.options, strict=True))


def _counts(kind: ItemGroup) -> Iterator[tuple[int, ...]]:
    """Return the possible numbers of items for each option of a kind."""

    def shared(options: int, items: int) -> Iterator[tuple[int, ...]]:
        if options == 0:
            yield ()
            return
        for count in range(items + 1):
            for others in shared(options - 1, items - count):
                yield (count, *others)

    return shared(len(kind.options), kind.items)


@dataclass(frozen=True)
class _Step:
    """A step of the linear relaxation: a number of bytes, and the cost of each."""

    rate: float
    frees: int


class _Bounds:
    """Linear relaxations of the kinds after each of them; their steps are sorted once.

    Arrays are [constraints, steps], filled up with steps that free nothing.
    """

    def __init__(self, kinds: Sequence[ItemGroup], constraints: int):
        hulls = [[_hull(kind, index) for kind in kinds] for index in range(constraints)]
        most = max((sum(map(len, hull)) for hull in hulls), default=0)
        self._kinds, self._frees = (
            np.zeros((constraints, most), dtype=np.int64),
            np.zeros((constraints, most), dtype=np.int64),
        )
        self._rates = np.zeros((constraints, most))
        for index, hull in enumerate(hulls):
            steps = sorted(
                ((step.rate, number, step.frees) for number, each in enumerate(hull) for step in each),
                key=itemgetter(0),
            )
            if steps:
                own = slice(len(steps))
                self._rates[index, own], self._kinds[index, own], self._frees[index, own] = zip(
                    *steps, strict=True
                )

    def after(self, number: int) -> _Bound:
        """Return the bound of the kinds after kind `number`."""
        return _Bound(self._rates, np.where(self._kinds > number, self._frees, 0))


class _Bound:
    """Least cost at which some kinds free a number of bytes, for each constraint, with fractions of items.

    Args:
        rates, frees: of steps in ascending order of their rates, [constraints, steps].
    """

    def __init__(self, rates: Array, frees: Array):
        nothing = np.zeros((len(frees), 1), dtype=np.int64)
        self._freed = np.concatenate((nothing, np.cumsum(frees, axis=1)), axis=1)
        self._costs = np.concatenate((nothing, np.cumsum(frees * rates, axis=1)), axis=1)
        self._rates = np.concatenate((nothing, rates), axis=1)

    def least(self, left: Array) -> Array:
        """Return a lower bound of the cost of freeing `left` bytes, or infinity where that is impossible.

        Args:
            left: [..., constraints].
        """
        bound = np.zeros(left.shape[:-1])
        for index, (freed, costs, rates) in enumerate(
            zip(self._freed, self._costs, self._rates, strict=True)
        ):
            need = left[..., index]
            step = np.searchsorted(freed, need)  # freed[step - 1] < need ≤ freed[step]
            inside = np.minimum(step, len(freed) - 1)
            bounds = costs[inside] - (freed[inside] - need) * rates[inside]
            bound = np.maximum(bound, np.where(step == len(freed), np.inf, bounds))
        return bound


def _hull(kind: ItemGroup, index: int) -> list[_Step]:
    """Return the lower convex hull of a kind's options for one constraint."""
    points, at, steps = (
        [(option.frees[index], option.cost) for option in kind.options],
        (0, 0.0),
        list[_Step](),
    )
    while further := [point for point in points if point[0] > at[0]]:
        start = at
        rate, frees, cost = min(
            ((cost - start[1]) / (frees - start[0]), -frees, cost) for frees, cost in further
        )
        steps.append(_Step(max(rate, 0.0), kind.items * (-frees - start[0])))
        at = (-frees, cost)
    return steps


def _greedy(kinds: Sequence[ItemGroup], needs: tuple[int, ...]) -> Counts | None:
    """Return a good choice.

    Items are added one by one, with the cheapest option for the remaining need. Items that turn out to be
    unnecessary are removed at the end.
    """
    # of each kind, the place of keeping everything, before its options
    first = [0, *accumulate(1 + len(kind.options) for kind in kinds)]
    moves = [  # from one place to another of the same kind
        (start + other, start + option)
        for start, kind in zip(first, kinds, strict=False)
        for option in range(1, 1 + len(kind.options))
        for other in range(1 + len(kind.options))
        if other != option
    ]
    sources, targets = np.array(moves, dtype=np.int64).reshape(-1, 2).T
    keeping = Option(0.0, (0,) * len(needs))
    places = [option for kind in kinds for option in (keeping, *kind.options)]
    frees = np.array([option.frees for option in places], dtype=np.int64)
    costs = np.array([option.cost for option in places])
    frees, costs = frees[targets] - frees[sources], np.maximum(costs[targets] - costs[sources], 0.0)
    items = np.zeros(len(places), dtype=np.int64)
    items[first[:-1]] = [kind.items for kind in kinds]
    left, wanted = np.array(needs, dtype=np.int64), np.array(needs)
    while (left > 0).any():
        gains = ((np.maximum(left, 0) - np.maximum(left - frees, 0)) / wanted).sum(1)  # of what is needed
        gains *= items[sources] > 0
        if gains.max(initial=0.0) <= 0:
            return None
        best = int(np.argmin(np.where(gains > 0, costs / np.where(gains > 0, gains, 1.0), np.inf)))
        useful = [
            -(-need // freed)
            for need, freed in zip(left.tolist(), frees[best].tolist(), strict=True)
            if need > 0 and freed > 0
        ]
        count = 1 if (frees[best] < 0).any() else min(int(items[sources[best]]), *useful)
        items[targets[best]] += count
        items[sources[best]] -= count
        left -= count * frees[best]
    taken = [items[start + 1 : stop].tolist() for start, stop in pairwise(first)]
    _take_back(kinds, taken, left.tolist())
    return tuple(map(tuple, taken))


def _take_back(kinds: Sequence[ItemGroup], taken: list[list[int]], left: list[int]) -> None:
    """Keep everything again in items that are not needed, starting with the most expensive."""
    every = [
        (option.cost, number, index)
        for number, kind in enumerate(kinds)
        for index, option in enumerate(kind.options)
    ]
    for _, number, index in sorted(every, reverse=True):
        frees = kinds[number].options[index].frees
        while taken[number][index] and all(
            need + freed <= 0 for need, freed in zip(left, frees, strict=True)
        ):
            taken[number][index] -= 1
            for i, freed in enumerate(frees):
                left[i] += freed
