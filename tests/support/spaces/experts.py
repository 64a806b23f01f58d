"""The space of layouts with a mixture of experts."""

from __future__ import annotations

from typing import Any

from tests.support.configs import staged, with_fewer_rows
from tests.support.jobs_experts import BASE
from tests.support.jobs_experts import configs as configs_of
from tests.support.spaces.layouts import stages
from tests.support.spaces.space import Case, Configs, Space, world

OPTIONS: dict[str, tuple[Any, ...]] = {
    "ep": (1, 2, 4),
    "tp": (1, 2),  # with sequence parallelism
    "schedule": ("whole", "1f1b", "zb-h1", "zb-v"),
    "dp": (1, 2, 4),
    "context": ("none", "ulysses", "gather", "ring"),  # of two ranks
    "parts": ("zigzag", "balanced"),
    "zero": (0, 1, 2, 3),
    "groups": (False, True),  # shards over two of four data ranks
    "recompute": ("none", "full", "every-2", "operations"),
    "balance": ("global", "sequence", "bias", "bias_loss"),
    "dispatch": ("all_to_all", "all_gather"),
    "capacity": (None, 0.7),
    "optimizer": ("adamw", "muon"),
}


def sizes(case: Case) -> Case:
    return {**case, **staged(case["schedule"]), "cp": 1 if case["context"] == "none" else 2}


def is_legal(case: Case) -> bool:
    """2 to 8 ranks, of which ep divides those of a stage, and those that share an expert's shards."""
    full = sizes(case)
    data = full["dp"] * full["cp"]
    grouped = data == 4 and full["pp"] == 1 and full["zero"] > 0
    shard = 2 if case["groups"] else data
    exchanged = data * full["tp"] % full["ep"] == 0 and (full["zero"] == 0 or shard * full["tp"] % full["ep"] == 0)
    parts = case["parts"] == "zigzag" or case["context"] in ("gather", "ring")
    return 1 < world(full) <= 8 and exchanged and parts and (grouped or not case["groups"])


def complete(case: Case) -> Case:
    full = {**BASE, **sizes(case), "sequence_parallel": case["tp"] > 1}
    full |= {"context_parts": case["parts"], "dp_shard": 2 if case["groups"] else None}
    return {**full, "layers": max(stages(full), 3), "model": {"expert_capacity_factor": case["capacity"]}}


def configs(case: Case, prefix: str) -> Configs:
    both = configs_of(prefix, **complete(case))
    with_fewer_rows(*both)
    return both


SPACE = Space(
    name="experts",
    options=OPTIONS,
    bound=("ep", "tp", "schedule", "dp", "context", "parts", "zero", "groups"),
    is_legal=is_legal,
    model=("balance", "capacity", "optimizer", "layers"),
    complete=complete,
    configs=configs,
)
