"""Searches the pairwise table: cases that hold every legal pair of option values, for as few seconds as possible.

    python -m tests.distributed.support.covering [--cases 52] [--moves 4000000] [--seed 1]

Simulated annealing from the table in table.txt, which it replaces if it finds a cheaper one, or if that one lacks a pair (an option has a
new value). A few minutes for the default number of moves. A move changes one option of one case; a missing pair counts as MISSING seconds.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from functools import cache
from itertools import combinations
from random import Random

from tests.distributed.support import layouts
from tests.distributed.support.layouts import NAMED, OPTIONS, TABLE, Case, is_legal, stages, with_layers, world

MISSING = 20.0
HOTTEST, COLDEST = 6.0, 0.01
KEPT = 2  # the full layout in both precisions
MODEL = ("tied", "kv_heads", "vocab_size", "layers", "masked", "dropout", "precision")
SIZES = ("tp", "pp", "dp", "sequence_parallel")
RECOMPUTED = {"none": 1.0, "selective": 1.15, "full": 1.35, "every-2": 1.2}
Key = tuple[object, ...]


@cache
def _seconds(key: Key) -> float:
    """Of one case on two cores, by counts of what its ranks do (milliseconds per layer, collective and message are measured)."""
    case = with_layers(dict(zip(OPTIONS, key, strict=True)))
    tp, pp, dp, zero, sequence_parallel = (case[option] for option in ("tp", "pp", "dp", "zero", "sequence_parallel"))
    lonely = pp > 1 and case["microbatches"] == 1  # shows little of a pipeline: it counts as more than two
    microbatches = 2 if lonely else case["microbatches"]
    layers, again = case["layers"] / pp, case["recompute"] in ("full", "every-2")
    each = 12 + 4 * microbatches * layers * RECOMPUTED[case["recompute"]]
    if tp > 1:
        collectives = (10 if sequence_parallel else 4) * (1.3 if again else 1.0) * layers + 2 / pp
        each += 0.45 * (tp - 1) * microbatches * collectives
    if pp > 1:
        each += 5 * microbatches * stages(case) / pp
    if dp > 1:
        gathers = 2 * microbatches if zero == 3 else int(zero > 0)
        each += 0.7 * (dp - 1) * (layers + 1) * ((microbatches if zero >= 2 else 1) + gathers)
    steps = 20 if case["precision"] == "fp32" else 10
    return float(
        world(case) * each * steps / 1000 / min(world(case), 2)
        + 0.4
        + 0.12 * world(case)
        + 0.4 * (case["offload"] == "disk")
        + 0.3 * lonely
    )


def seconds(case: Case) -> float:
    return _seconds(tuple(case.values()))


def reference(case: Case) -> Key:
    """Cases of equal references share one run of one process."""
    complete = with_layers(case)
    return (*(complete[option] for option in MODEL), layouts.global_batch(case))


def reference_seconds(key: Key) -> float:
    return 0.25 + 0.16 * float(str(key[MODEL.index("layers")])) * (1.0 if "fp32" in key else 0.5)


def in_order(case: Case) -> Case:
    return {option: case[option] for option in OPTIONS}


class Search:
    """A table under annealing, with the counts that a move changes."""

    def __init__(self, table: list[Case], seed: int):
        self.random, self.table, self.legal = Random(seed), table, layouts.legal_pairs()
        self.counts = Counter(pair for case in table for pair in layouts.pairs_of(case))
        self.references = Counter(map(reference, table))

    def missing(self) -> int:
        return sum(not self.counts[pair] for pair in self.legal)

    def total(self) -> float:
        return sum(map(seconds, self.table)) + sum(reference_seconds(key) for key, count in self.references.items() if count)

    def move(self, temperature: float) -> None:
        number = self.random.randrange(KEPT, len(self.table))
        old, option = self.table[number], self.random.choice(list(OPTIONS))
        new = {**old, option: self.random.choice(OPTIONS[option])}
        if not is_legal(new):  # make room, perhaps
            size = self.random.choice(SIZES)
            new[size] = self.random.choice(OPTIONS[size])
        if new == old or not is_legal(new):
            return
        changed = [each for each in OPTIONS if new[each] != old[each]]
        lost, gained = (self._pairs(case, changed) for case in (old, new))
        before, after = reference(old), reference(new)
        rise = seconds(new) - seconds(old)
        rise += MISSING * (sum(self.counts[pair] == 1 for pair in lost) - sum(self.counts[pair] == 0 for pair in gained))
        if before != after:
            rise += reference_seconds(after) * (not self.references[after]) - reference_seconds(before) * (self.references[before] == 1)
        if rise <= 0 or self.random.random() < math.exp(-rise / temperature):
            self.table[number] = new
            self.counts.subtract(lost)
            self.counts.update(gained)
            self.references[before] -= 1
            self.references[after] += 1

    @staticmethod
    def _pairs(case: Case, changed: list[str]) -> list[tuple[tuple[str, object], tuple[str, object]]]:
        """The pairs of a case in which a changed option is, in the order of OPTIONS."""
        return [((a, case[a]), (b, case[b])) for a, b in combinations(OPTIONS, 2) if a in changed or b in changed]


def write(table: list[Case]) -> None:
    """The named cases, then by ranks, so that neighbours use the same process groups."""
    rest = sorted(table[KEPT:], key=lambda case: (world(case), case["tp"], case["pp"], str(case["schedule"])))
    rows = [list(OPTIONS), *([str(value) for value in case.values()] for case in table[:KEPT] + rest)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    TABLE.write_text("".join("  ".join(map(str.ljust, row, widths)).rstrip() + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.distributed.support.covering")
    parser.add_argument("--cases", type=int, default=52)
    parser.add_argument("--moves", type=int, default=4_000_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    now = [in_order(case) for case in layouts.pairwise()]
    before = Search(now, 0)
    print(f"table.txt: {len(now)} cases, about {before.total():.0f} s, {before.missing()} pairs missing")
    start = now + [now[KEPT + number % (len(now) - KEPT)] for number in range(options.cases - len(now))]
    search = Search([dict(case) for case in start[: options.cases]], options.seed)
    for number in range(options.moves):
        search.move(max(HOTTEST * (1 - number / options.moves) ** 2, COLDEST))
    print(f"found:     {len(search.table)} cases, about {search.total():.0f} s, {search.missing()} pairs missing")
    if (search.missing(), search.total()) < (before.missing(), before.total()):
        write(search.table)


if __name__ == "__main__":
    assert in_order(NAMED) == NAMED
    main()
