"""The space of layouts and dense models over which a run must equal one process."""

from __future__ import annotations

from typing import Any

from megalite.parallel.pipeline.generator import chunks_of
from tests.support.configs import config_of, config_of_one_process, schedule_options
from tests.support.spaces.space import Case as Case
from tests.support.spaces.space import Configs, Space
from tests.support.spaces.space import world as world

OPTIONS: dict[str, tuple[Any, ...]] = {
    "tp": (1, 2, 4),
    "pp": (1, 2, 4, 8),
    "dp": (1, 2, 3, 4),
    "schedule": ("1f1b", "gpipe", "interleaved-2", "interleaved-3", "zb-h1", "zb-h2", "zb-v", "v-half"),
    "zero": (0, 1, 2, 3),
    "offload": ("none", "cpu", "disk"),
    "sequence_parallel": (False, True),
    "microbatches": (1, 2, 8),
    "recompute": ("none", "selective", "full", "every-2", "budget"),
    "tied": (False, True),
    "kv_heads": (4, 1),
    "vocab_size": (96, 101),
    "uneven": (False, True),  # one layer more than stages
    "masked": (False, True),
    "dropout": (0.0, 0.1),
    "precision": ("fp64", "fp32"),
    "optimizer": ("adamw", "muon"),
    "ema": (False, True),
}
MAX_WORLD = 8


def stages(case: Case) -> int:
    """The number of pipeline stages over all ranks."""
    return int(case["pp"] * chunks_of(*schedule_options(case["schedule"])))


def with_layers(case: Case) -> Case:
    """The case with as many layers as its stages need, and no more: every layer of every case is paid for in time."""
    fewest = 3 if case["recompute"] == "every-2" else 2  # a group of two, and one that is cut short
    return {**case, "layers": max(stages(case), fewest) + case["uneven"]}


def is_legal(case: Case) -> bool:
    """At most 8 ranks; sequence parallelism only with tp.

    Muon runs where the weights are, and in fp64: its iterations enlarge the rounding of fp32. An average is not kept on
    disk.
    """
    small = case["tp"] * case["pp"] * case["dp"] <= MAX_WORLD and case["tp"] > case["sequence_parallel"]
    muon = case["optimizer"] == "adamw" or (case["offload"] == "none" and case["precision"] == "fp64")
    return small and muon and not (case["ema"] and case["offload"] == "disk")


def configs(case: Case, prefix: str) -> Configs:
    complete = with_layers(case)
    return config_of(complete, prefix, case["precision"]), config_of_one_process(complete, prefix)


NAMED = {  # always in the table, under these names
    "tp": 2,
    "pp": 2,
    "dp": 2,
    "schedule": "1f1b",
    "zero": 1,
    "offload": "none",
    "sequence_parallel": True,
    "microbatches": 2,
    "recompute": "none",
    "tied": True,
    "kv_heads": 1,
    "vocab_size": 101,
    "uneven": True,
    "masked": True,
    "dropout": 0.1,
    "precision": "fp64",
    "optimizer": "adamw",
    "ema": False,
}

SPACE = Space(
    name="layouts",
    options=OPTIONS,
    bound=("tp", "pp", "dp", "offload", "sequence_parallel", "precision", "optimizer", "ema"),
    is_legal=is_legal,
    model=("tied", "kv_heads", "vocab_size", "layers", "masked", "dropout", "precision", "optimizer", "ema"),
    complete=with_layers,
    configs=configs,
    named=(NAMED, {**NAMED, "precision": "fp32"}),
)
