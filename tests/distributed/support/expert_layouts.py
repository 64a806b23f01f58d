"""Layouts with experts, each to equal one process: the space of which `test_experts.py` has named layouts, for the long form."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from tests.distributed.support.jobs_experts import configs as configs_of
from tests.distributed.support.layouts import Case

OPTIONS: dict[str, tuple[Any, ...]] = {
    "ep": (1, 2, 4),
    "tp": (1, 2),  # with sequence parallelism
    "schedule": ("whole", "1f1b", "zb-h1", "zb-v"),
    "dp": (1, 2, 4),
    "cp": (1, 2),
    "zero": (0, 1, 2, 3),
    "recompute": ("none", "full", "every-2"),
    "balance": ("global", "sequence", "bias", "bias_loss"),
    "dispatch": ("all_to_all", "all_gather"),
    "capacity": (None, 0.7),
}
CONTEXT = {0: "ulysses", 1: "gather", 2: "ring", 3: "gather"}  # by ZeRO stage: cp has a table of its own


def is_legal(case: Case) -> bool:
    """Whether a case runs on 2 to 8 ranks, and its ep divides those of a stage."""
    ranks = case["tp"] * case["dp"] * case["cp"]
    return 1 < ranks * (1 if case["schedule"] == "whole" else 2) <= 8 and ranks % case["ep"] == 0


def every_case() -> Iterator[Case]:
    yield from filter(is_legal, (dict(zip(OPTIONS, values, strict=True)) for values in product(*OPTIONS.values())))


def complete(case: Case) -> Case:
    """As `jobs_experts.configs` takes it."""
    plan = {"schedule": "1f1b", "pp": 1} if case["schedule"] == "whole" else {"pp": 2}
    return {**case, **plan, "context": CONTEXT[case["zero"]], "model": {"expert_capacity_factor": case["capacity"]}}


def name(case: Case) -> str:
    return "-".join(f"{option}{value}" if isinstance(value, int | float) else str(value) for option, value in case.items())


def configs(case: Case, prefix: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The configuration of a case, and of the same model and data on one process."""
    return configs_of(prefix, **complete(case))
