"""The space of layouts and models over which a run must equal one process, and a pairwise table of it.

A case is a dict of option values. `pairwise()` gives a small list of legal cases in which every legal pair of option values occurs;
`every_case()` walks the whole space.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

Case = dict[str, Any]

OPTIONS: dict[str, tuple[Any, ...]] = {
    "tp": (1, 2, 4),
    "pp": (1, 2, 4),
    "dp": (1, 2, 3, 4),
    "schedule": ("1f1b", "gpipe"),
    "zero": (0, 1),
    "sequence_parallel": (False, True),
    "microbatches": (1, 2, 8),
    "recompute": ("none", "selective", "full", "every-2"),
    "tied": (False, True),
    "kv_heads": (4, 1),
    "vocab_size": (96, 101),
    "layers": (4, 5),
    "masked": (False, True),
    "dropout": (0.0, 0.1),
}
MAX_WORLD = 8


def is_legal(case: Case) -> bool:
    """Whether a (possibly partial) case can run here: at most 8 ranks, sequence parallelism only with tp."""
    world = case.get("tp", 1) * case.get("pp", 1) * case.get("dp", 1)
    return world <= MAX_WORLD and not (case.get("sequence_parallel") and case.get("tp") == 1)


def global_batch(case: Case) -> int:
    return 24 if case["dp"] == 3 else 32


def micro_batch(case: Case) -> int:
    return global_batch(case) // (case["dp"] * case["microbatches"])


def name(case: Case) -> str:
    flags = [f"tp{case['tp']}", f"pp{case['pp']}", f"dp{case['dp']}", case["schedule"], f"zero{case['zero']}", f"m{case['microbatches']}"]
    flags += ["sp"] if case["sequence_parallel"] else []
    flags += [case["recompute"], f"kv{case['kv_heads']}", f"v{case['vocab_size']}", f"l{case['layers']}"]
    return "-".join(flags + [flag for flag in ("tied", "masked", "dropout") if case[flag]])


def every_case() -> Iterator[Case]:
    for values in product(*OPTIONS.values()):
        case = dict(zip(OPTIONS, values, strict=True))
        if is_legal(case) and global_batch(case) % (case["dp"] * case["microbatches"]) == 0:
            yield case


NAMED = {  # in the table by name, whatever the pairs need
    "tp": 2,
    "pp": 2,
    "dp": 2,
    "schedule": "1f1b",
    "zero": 1,
    "sequence_parallel": True,
    "microbatches": 2,
    "recompute": "none",
    "tied": True,
    "kv_heads": 1,
    "vocab_size": 101,
    "layers": 5,
    "masked": True,
    "dropout": 0.1,
}


def legal_pairs() -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    pairs = set()
    for one, other in combinations(OPTIONS, 2):
        for a, b in product(OPTIONS[one], OPTIONS[other]):
            if is_legal({one: a, other: b}):
                pairs.add(((one, a), (other, b)))
    return pairs


def pairs_of(case: Case) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return set(combinations(case.items(), 2))


def _pair(one: tuple[str, Any], other: tuple[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted((one, other), key=lambda item: list(OPTIONS).index(item[0])))


def pairwise() -> list[Case]:
    """Greedy cover: seed each case with an uncovered pair, then choose each option's value for the most new pairs. Deterministic."""
    table = [dict(NAMED)]
    missing = legal_pairs() - pairs_of(NAMED)
    while missing:
        seed = min(missing, key=repr)
        case: Case = dict(seed)
        for option, values in OPTIONS.items():
            if option not in case:
                legal = [value for value in values if is_legal({**case, option: value})]
                known = list(case.items())

                gains = [len(missing & {_pair(item, (option, value)) for item in known}) for value in legal]
                case[option] = legal[gains.index(max(gains))]
        case = {option: case[option] for option in OPTIONS}
        missing -= pairs_of(case)
        table.append(case)
    return table
