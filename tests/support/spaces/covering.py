"""Searches the pairwise tables: cases that hold every legal pair of option values, for as few seconds as possible.

    python -m tests.support.spaces.covering SPACE [--cases 52] [--moves 4000000] [--seed 1]

Simulated annealing from the table in tables/SPACE.txt, which it replaces if it finds a cheaper one, or if that one
lacks a pair (an option has a new value). A few minutes for the default number of moves. A move changes one option of
one case; a missing pair counts as MISSING seconds.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from random import Random
from typing import Any

from tests.support.configs import global_batch
from tests.support.spaces import attention, context, experts, layouts
from tests.support.spaces.layouts import stages
from tests.support.spaces.space import Case, Space, world

SPACES = {space.name: space for space in (layouts.SPACE, context.SPACE, experts.SPACE, attention.SPACE)}
"""All spaces of layouts, by name."""
MISSING = 20.0
HOTTEST, COLDEST = 6.0, 0.01
TRIALS = 4  # other options that a move may change, too, to be legal
RECOMPUTED = {"none": 1.0, "selective": 1.15, "full": 1.35, "every-2": 1.2, "operations": 1.35, "budget": 1.3}
Key = tuple[object, ...]
Reference = tuple[Key, float]
"""What a run of one process depends on, and its seconds: cases with equal ones share it."""


def seconds(case: Case) -> float:
    """Of a complete case on two cores, by counts of what its ranks do (milliseconds per layer, collective and message
    are measured)."""
    tp, pp, zero, recompute = (case[option] for option in ("tp", "pp", "zero", "recompute"))
    cp = case.get("cp", 1)
    data, ranks = case["dp"] * cp, world(case)
    lonely = pp > 1 and case["microbatches"] == 1  # shows little of a pipeline: it counts as more than two
    microbatches, layers = 2 if lonely else case["microbatches"], case["layers"] / pp
    each = 12 + 4 * microbatches * layers * RECOMPUTED[recompute]
    if tp > 1:
        collectives = (
            (10 if case["sequence_parallel"] else 4)
            * (1.3 if recompute in ("full", "every-2", "operations") else 1.0)
            * layers
        )
        each += 0.45 * (tp - 1) * microbatches * (collectives + 2 / pp)
    if pp > 1:
        each += 5 * microbatches * stages(case) / pp
    if data > 1:
        gathers = 2 * microbatches if zero == 3 else int(zero > 0)
        each += 0.7 * (data - 1) * (layers + 1) * ((microbatches if zero >= 2 else 1) + gathers)
    each += 4 * (cp - 1) * microbatches * layers
    each += 3 * (case.get("balance") is not None) * microbatches * layers * (1 + (case.get("ep", 1) > 1))
    each += (6 * layers + data) * (case.get("optimizer") == "muon")
    steps = 20 if case.get("precision") == "fp32" else 10
    fixed = (
        0.4
        + 0.12 * ranks
        + 0.4 * (case.get("offload") == "disk")
        + 0.1 * ranks * (recompute == "budget")
        + 0.3 * lonely
    )
    return float(ranks * each * steps / 1000 / min(ranks, 2) + fixed)


class Priced:
    """The seconds of cases of a space, and of the runs of one process that they share."""

    def __init__(self, space: Space):
        self.space = space
        self._known: dict[Key, tuple[float, Reference]] = {}

    def of(self, case: Case) -> tuple[float, Reference]:
        """Seconds of a case, and the run of one process that it is compared with."""
        key = tuple(case.values())
        if key not in self._known:
            full = self.space.complete(case)
            reference = (*(full[option] for option in self.space.model), global_batch(full))
            alone = 0.25 + 0.16 * full["layers"] * (1.0 if full.get("precision") == "fp32" else 0.5)
            self._known[key] = seconds(full), (reference, alone)
        return self._known[key]


class Search:
    """A table under annealing, with the counts that a move changes."""

    def __init__(self, space: Space, table: list[Case], seed: int):
        self.space, self.random, self.table = (
            space,
            Random(seed),
            [{name: case[name] for name in space.options} for case in table],
        )
        self.legal, self.priced, self.kept = space.legal_pairs(), Priced(space), len(space.named)
        self.counts = Counter(pair for case in self.table for pair in space.pairs_of(case))
        self.references = Counter(self.priced.of(case)[1] for case in self.table)

    def missing(self) -> int:
        return sum(not self.counts[pair] for pair in self.legal)

    def total(self) -> float:
        alone = sum(price for (_, price), count in self.references.items() if count)
        return sum(self.priced.of(case)[0] for case in self.table) + alone

    def _changed(self, old: Case) -> Case:
        """A case with one option changed, and with more if that is not legal."""
        new, options = dict(old), self.space.options
        for option in self.random.choices(list(options), k=TRIALS):
            new[option] = self.random.choice(options[option])
            if new != old and self.space.is_legal(new):
                return new
        return old

    def move(self, temperature: float) -> None:
        number = self.random.randrange(self.kept, len(self.table))
        old = self.table[number]
        new = self._changed(old)
        if new is old:
            return
        changed = [each for each in self.space.options if new[each] != old[each]]
        lost, gained = (self.space.pairs_with(case, changed) for case in (old, new))
        (cost, leaves), (new_cost, enters) = self.priced.of(old), self.priced.of(new)
        rise = new_cost - cost
        rise += MISSING * (
            sum(self.counts[pair] == 1 for pair in lost) - sum(self.counts[pair] == 0 for pair in gained)
        )
        if leaves != enters:
            rise += enters[1] * (not self.references[enters]) - leaves[1] * (self.references[leaves] == 1)
        if rise <= 0 or self.random.random() < math.exp(-rise / temperature):
            self.table[number] = new
            self.counts.subtract(lost)
            self.counts.update(gained)
            self.references[leaves] -= 1
            self.references[enters] += 1


def in_order(space: Space, table: list[Case]) -> list[Case]:
    """The named cases, then by ranks, so that neighbours use the same process groups."""

    def sizes(case: Case) -> tuple[Any, ...]:
        full = space.complete(case)
        return world(full), *(full.get(axis, 1) for axis in ("tp", "pp", "cp", "ep")), str(full["schedule"])

    named = len(space.named)
    return table[:named] + sorted(table[named:], key=sizes)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.spaces.covering")
    parser.add_argument("space", choices=SPACES)
    parser.add_argument("--cases", type=int, default=52)
    parser.add_argument("--moves", type=int, default=4_000_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    space, random = SPACES[options.space], Random(options.seed)
    now = space.table() if space.file.exists() else list(space.named)
    before = Search(space, now, 0)
    print(f"{space.file.name}: {len(now)} cases, about {before.total():.0f} s, {before.missing()} pairs missing")
    start = now + [space.draw(random) for _ in range(options.cases - len(now))]
    search = Search(space, start[: options.cases], options.seed)
    for number in range(options.moves):
        search.move(max(HOTTEST * (1 - number / options.moves) ** 2, COLDEST))
    print(f"found: {len(search.table)} cases, about {search.total():.0f} s, {search.missing()} pairs missing")
    if (search.missing(), search.total()) < (before.missing(), before.total()):
        space.write(in_order(space, search.table))


if __name__ == "__main__":
    main()
