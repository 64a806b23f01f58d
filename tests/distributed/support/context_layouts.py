"""Layouts with context parallelism, each to equal one process, and a table of them in which every legal pair of option values occurs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import combinations, product
from random import Random
from typing import Any

from tests.distributed.support.configs import SEQUENCE, SINGLE, config_of, config_of_one_process
from tests.distributed.support.layouts import Case, stages, world

OPTIONS: dict[str, tuple[Any, ...]] = {
    "cp": (2, 4),
    "context": ("ulysses", "gather", "ring"),
    "tp": (1, 2),  # with sequence parallelism
    "schedule": ("whole", "1f1b", "zb-v"),
    "dp": (1, 2),
    "zero": (0, 1, 2, 3),
    "recompute": ("none", "selective", "full"),
    "kv_heads": (4, 1),
    "documents": (False, True),
    "window": (None, 5),
    "dropout": (0.0, 0.1),
    "length": (16, 13, 3),  # 13: rows are padded; 3: with cp 4 a rank has no token at all
}
FIXED: Case = {**SINGLE, "tied": False, "vocab_size": 101, "precision": "fp64"}
Pairs = set[tuple[tuple[str, Any], tuple[str, Any]]]


def is_legal(case: Case) -> bool:
    """Whether a (possibly partial) case runs on at most 8 ranks, with whole heads of 4 for each under ulysses."""
    cp, tp = case.get("cp", 2), case.get("tp", 1)
    whole = case.get("context") != "ulysses" or cp * tp <= 4
    return cp * tp * case.get("dp", 1) * (1 if case.get("schedule", "whole") == "whole" else 2) <= 8 and whole


def pairs_of(case: Case) -> Pairs:
    return set(combinations([(option, case[option]) for option in OPTIONS], 2))


def legal_pairs() -> Pairs:
    found = set()
    for one, other in combinations(OPTIONS, 2):
        found |= {((one, a), (other, b)) for a, b in product(OPTIONS[one], OPTIONS[other]) if is_legal({one: a, other: b})}
    return found


def every_case() -> Iterator[Case]:
    yield from filter(is_legal, (dict(zip(OPTIONS, values, strict=True)) for values in product(*OPTIONS.values())))


@cache
def pairwise() -> tuple[Case, ...]:
    """Every legal pair, in few cases: of some hundred random ones always the one with the most pairs that are still missing."""
    random, everything, table, missing = Random(0), list(every_case()), [], legal_pairs()
    while missing:
        best = max(random.sample(everything, 400), key=lambda case: len(pairs_of(case) & missing) - 0.1 * cost(case))
        table.append(best)
        missing -= pairs_of(best)
    return tuple(sorted(table, key=lambda case: (cost(case), case["cp"], case["tp"])))  # groups and meshes are used again


def cost(case: Case) -> int:
    return int(world(complete(case)))


def complete(case: Case) -> Case:
    """With the options of the equivalence table that do not vary here."""
    one, masked = case["schedule"] == "whole", case["documents"]
    plan = {"schedule": "1f1b", "pp": 1} if one else {"schedule": case["schedule"], "pp": 2, "microbatches": 2}
    made = {**FIXED, **case, **plan, "masked": masked, "sequence_parallel": case["tp"] > 1}
    return {**made, "layers": max(stages(made), 2)}


def name(case: Case) -> str:
    words = [
        f"{option}{value}" if isinstance(value, int) else str(value)
        for option, value in case.items()
        if option not in ("documents", "window")
    ]
    return "-".join([*words, *(option for option in ("documents", "window") if case[option])])


def configs(case: Case, prefix: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The configuration of a case, and of the same model and data on one process."""
    made = complete(case)
    both = config_of(made, prefix, "fp64"), config_of_one_process(made, prefix)
    for config in both:
        for size in ("global_batch_size", "micro_batch_size"):  # a quarter of the rows of other tables: the same pairs for less time
            config["train"][size] //= 4
        config["data"]["sequence_length"] = case["length"]
        config["model"] |= {"sliding_window": case["window"], "max_position_embeddings": SEQUENCE}
    return both
