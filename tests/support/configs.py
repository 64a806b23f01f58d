"""Configurations of the equivalence table: a tiny Llama on random documents, at the proof settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from megalite.config.load import from_dict
from megalite.config.recompute import BUDGET, OPERATIONS
from megalite.data.preparation.writer import IndexedWriter
from tests.support.spaces.space import Case

SEQUENCE = 16
STEPS = 20
EOS = 0
SINGLE = {
    **{"tp": 1, "pp": 1, "dp": 1, "cp": 1, "schedule": "1f1b", "microbatches": 1},
    **{"zero": 0, "offload": "none", "sequence_parallel": False, "recompute": "none"},
}
CONTEXT = ("cp", "context", "context_inner", "context_parts", "dp_shard")
MUON = {"lr": 2e-3, "ns_dtype": "compute"}  # bf16 iterations round differently on each layout
EMA_DECAY = 0.8


def case_of(**options: Any) -> Case:
    """A case on one process in one microbatch, but for some options."""
    return {**SINGLE, **options}


def schedule_options(schedule: str) -> tuple[str, int | None]:
    """parallel.schedule and parallel.virtual_stages: `interleaved-3` is interleaved with three stages per rank."""
    name, _, chunks = schedule.partition("interleaved-")
    return ("interleaved", int(chunks)) if chunks else (name, None)


def global_batch(case: Case) -> int:
    return 24 if case["dp"] == 3 else 32


def micro_batch(case: Case) -> int:
    return global_batch(case) // (case["dp"] * case["microbatches"])


def write_tokens(directory: Path, vocab_size: int, count: int = 12_000, seed: int = 0) -> str:
    """A token file of random documents; returns its PREFIX."""
    random = np.random.default_rng(seed)
    tokens = random.zipf(1.3, count) % (vocab_size - 1) + 1  # a skewed distribution, so that the loss can fall
    ends = np.cumsum(random.integers(3, 40, count // 10))
    ends = np.append(ends[ends < count - 1], count - 1)
    tokens[ends] = EOS
    prefix = directory / f"tokens_{vocab_size}"
    with IndexedWriter(prefix, vocab_size) as writer:
        writer.add(tokens, np.diff(ends, prepend=-1).tolist())
        writer.finish({"vocab_size": vocab_size, "eos": EOS})
    return str(prefix)


def config_of(case: Case, prefix: str, precision: str = "fp32", **changes: dict[str, Any]) -> dict[str, Any]:
    """A complete configuration (as a dict) for a case of the table."""
    schedule, virtual_stages = schedule_options(case["schedule"])
    config: dict[str, dict[str, Any]] = {
        "run": {"dir": str(Path(prefix).parent), "name": "table"},
        "model": {
            "vocab_size": case["vocab_size"],
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": case["layers"],
            "num_attention_heads": 4,
            "num_key_value_heads": case["kv_heads"],
            "max_position_embeddings": SEQUENCE,
            "tie_word_embeddings": case["tied"],
            "embedding_dropout": case["dropout"],
            "attention_dropout": case["dropout"],
            "residual_dropout": case["dropout"],
        },
        "parallel": {
            **{option: case[option] for option in ("tp", "pp", "dp", "zero", "offload", "sequence_parallel")},
            **{option: case[option] for option in CONTEXT if option in case and case["cp"] > 1},
            "schedule": schedule,
            "virtual_stages": virtual_stages,
            "bucket_mb": 0.02,  # several buckets, so that reductions start at different times
        },
        "data": {
            "train": prefix,
            "sequence_length": SEQUENCE,
            "eod_mask_loss": case["masked"],
            "reset_positions": case["masked"],
        },
        "train": {
            "steps": STEPS,
            "global_batch_size": global_batch(case),
            "micro_batch_size": micro_batch(case),
            "precision": precision,
            "recompute": "+".join(OPERATIONS) if case["recompute"] == "operations" else case["recompute"],
            "grad_clip": 1.0,
            "ema_decay": EMA_DECAY if case.get("ema") else None,
        },
        "optimizer": {"lr": 3e-4, "eps": 1e-8, "warmup_steps": 2, "name": case.get("optimizer", "adamw")},
        "checkpoint": {"load": "none"},
    }
    if case.get("optimizer") == "muon":
        config["muon"] = MUON
    for section, values in changes.items():
        config[section] = {**config.get(section, {}), **values}
    if case["recompute"] == BUDGET:
        config["train"]["memory_budget"] = middle_budget(config)
    return config


def middle_budget(config: dict[str, Any]) -> float:
    """Bytes half way between a rank's peak with everything that can be recomputed, and with nothing."""
    from megalite.planner.budget.decision import decide_recomputation

    ranks = decide_recomputation(from_dict(config), 1 << 60, device="cpu").ranks
    return (max(rank.everything for rank in ranks) + max(rank.nothing for rank in ranks)) / 2


def config_of_one_process(case: Case, prefix: str) -> dict[str, Any]:
    """The same model, data and global batch on one process, in one microbatch."""
    config, batch = config_of({**case, **SINGLE}, prefix, case["precision"]), global_batch(case)
    config["train"] |= {"global_batch_size": batch, "micro_batch_size": batch}
    return config


def staged(schedule: str, microbatches: int = 2) -> Case:
    """The sizes of a schedule on two ranks; `whole`: of no pipeline."""
    plan = {"schedule": "1f1b", "pp": 1} if schedule == "whole" else {"schedule": schedule, "pp": 2}
    return {**plan, "microbatches": microbatches}


def with_fewer_rows(*configs: dict[str, Any]) -> None:
    """A quarter of the rows of the equivalence table, in place: the same for less time."""
    for config in configs:
        for size in ("global_batch_size", "micro_batch_size"):
            config["train"][size] //= 4
