"""Layouts with experts, each to equal one process, and a table of them in which every legal pair of option values occurs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import combinations, product
from random import Random
from typing import Any

from tests.distributed.support.jobs_experts import configs as configs_of
from tests.distributed.support.layouts import Case, world

OPTIONS: dict[str, tuple[Any, ...]] = {
    "ep": (2, 4, 1),
    "tp": (1, 2),  # with sequence parallelism
    "schedule": ("whole", "1f1b", "zb-h1", "zb-v"),
    "dp": (1, 2, 4),
    "cp": (1, 2),
    "zero": (0, 1, 2, 3),
    "recompute": ("none", "full", "every-2"),
    "balance": ("global", "sequence", "bias"),
    "dispatch": ("all_to_all", "all_gather"),
}
CONTEXT = {0: "ulysses", 1: "gather", 2: "ring", 3: "gather"}  # by ZeRO stage: cp has a table of its own
Pairs = set[tuple[tuple[str, Any], tuple[str, Any]]]


def is_legal(case: Case) -> bool:
    """Whether a case runs on at most 8 ranks, and its ep divides those of a stage."""
    ranks = case["tp"] * case["dp"] * case["cp"]
    return ranks * (1 if case["schedule"] == "whole" else 2) <= 8 and ranks % case["ep"] == 0


def pairs_of(case: Case) -> Pairs:
    return set(combinations([(option, case[option]) for option in OPTIONS], 2))


def every_case() -> Iterator[Case]:
    yield from filter(is_legal, (dict(zip(OPTIONS, values, strict=True)) for values in product(*OPTIONS.values())))


@cache
def legal_pairs() -> Pairs:
    """Those of any legal case."""
    return set().union(*map(pairs_of, every_case()))


@cache
def pairwise() -> tuple[Case, ...]:
    """Every legal pair, in few cases: of some hundred random ones always the one with the most pairs that are still missing."""
    random, everything, table, missing = Random(0), list(every_case()), list[Case](), set(legal_pairs())
    while missing:
        best = max(random.sample(everything, 400), key=lambda case: len(pairs_of(case) & missing) - 0.2 * world(complete(case)))
        table.append(best)
        missing -= pairs_of(best)
    return tuple(table)


def complete(case: Case) -> Case:
    """As `jobs_experts.configs` takes it."""
    whole = case["schedule"] == "whole"
    plan = {"schedule": "1f1b", "pp": 1} if whole else {"schedule": case["schedule"], "pp": 2}
    return {**case, **plan, "context": CONTEXT[case["zero"]]}


def name(case: Case) -> str:
    return "-".join(f"{option}{value}" if isinstance(value, int) else str(value) for option, value in case.items())


def configs(case: Case, prefix: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The configuration of a case, and of the same model and data on one process."""
    return configs_of(prefix, **complete(case))
