"""The space of layouts with context parallelism."""

from __future__ import annotations

from typing import Any

from tests.support.configs import SEQUENCE, SINGLE, config_of, config_of_one_process, staged, with_fewer_rows
from tests.support.spaces.layouts import stages
from tests.support.spaces.space import Case, Configs, Space, world

OPTIONS: dict[str, tuple[Any, ...]] = {
    "cp": (2, 4),
    "context": ("ulysses", "gather", "ring"),
    "inner": (1, 2),  # ranks that exchange heads within a ring
    "parts": ("zigzag", "balanced"),
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


def is_legal(case: Case) -> bool:
    """At most 8 ranks; under ulysses, whole heads and contiguous parts; inner ranks only in a ring of two groups."""
    ring = case["inner"] == 1 or (case["context"] == "ring" and case["cp"] == 4)
    whole = case["context"] != "ulysses" or (case["cp"] * case["tp"] <= 4 and case["parts"] == "zigzag")
    return ring and whole and world({**case, **staged(case["schedule"])}) <= 8


def complete(case: Case) -> Case:
    """With the options of the equivalence table that do not vary here."""
    plan = staged(case["schedule"], 1 if case["schedule"] == "whole" else 2)
    full = {**FIXED, **case, **plan, "masked": case["documents"], "sequence_parallel": case["tp"] > 1}
    full |= {"context_inner": case["inner"], "context_parts": case["parts"]}
    return {**full, "layers": max(stages(full), 2)}


def configs(case: Case, prefix: str) -> Configs:
    full = complete(case)
    both = config_of(full, prefix, "fp64"), config_of_one_process(full, prefix)
    with_fewer_rows(*both)
    for config in both:
        config["data"]["sequence_length"] = case["length"]
        config["model"] |= {"sliding_window": case["window"], "max_position_embeddings": SEQUENCE}
    return both


SPACE = Space(
    name="context",
    options=OPTIONS,
    bound=("cp", "context", "inner", "parts", "tp", "schedule", "dp"),
    is_legal=is_legal,
    model=("kv_heads", "documents", "window", "dropout", "length", "layers"),
    complete=complete,
    configs=configs,
)
