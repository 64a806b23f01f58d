"""Context parallelism on a CPU at 8,192 tokens.

The memory of four ranks is compared with that of one process, and steps with data parallelism. The overlap of
the hops of the ring with attention is also measured.

Memory is the maximum number of bytes of tensors that exist at the same time in a step, minus those that exist
before it: activations, and temporaries such as gathered keys. It is counted by the allocator, and does not
depend on load. Steps have equal tokens: four rows, one on each rank of dp 4, or a quarter of each of them.
`hidden` is the fraction of the time of the hops, measured alone, in which the rank does not wait for a hop
that both neighbors have posted. It is measured on two ranks with a core each.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import report
from benchmarks.step import SMOKE_MODEL

RANKS = 4
PAIR = 2
"""Number of ranks that measure the overlap of the ring's hops."""
MODEL = {
    **{"vocab_size": 512, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 1, "max_position_embeddings": 8192},
}
METHODS = ("ulysses", "gather", "ring")
RECOMPUTE = ("selective", "full")  # without it, a CPU keeps every probability: what is split then are these
MOST = {"ulysses": 0.30, "gather": 0.35, "ring": 0.30}
"""Maximum memory of a rank relative to one process, for a model with four query heads per key-value head.

gather keeps the keys and values of whole rows while a layer computes.
"""
COLUMNS = {
    "layout": "layout",
    "recompute": "recompute",
    "peak, MiB": "peak_mib:,.0f",
    "of one process": "of_one_process:.2f",
    "ms/step": "ms_per_step:,.0f",
    "of dp 4": "of_dp:.2f",
    "hops hidden": "hidden:.0%",
}


def compare(*, rounds: int, threads: int, smoke: bool, progress: Callable[[str], None]) -> dict[str, Any]:
    """Run all measurements, and return the figures with their conditions.

    `threads` is ignored, because each rank has one thread.
    """
    ranks, length, model = (
        (2, 64, {**SMOKE_MODEL, "max_position_embeddings": 64}) if smoke else (RANKS, 8192, MODEL)
    )
    protocol = {"ranks": ranks, "sequence_length": length, "warmup_steps": 1, "steps": 1, "rounds": rounds}
    with TemporaryDirectory(prefix="megalite_benchmark_") as scratch:
        prefix = report.write_random_tokens(Path(scratch), model["vocab_size"], 64 * length)

        def config(recompute: str, rows: int, **parallel: Any) -> dict[str, Any]:
            return {
                "run": {"dir": scratch, "name": "context"},
                "model": model,
                "parallel": {"bucket_mb": 1.0, **parallel},
                "data": {"train": prefix, "sequence_length": length},
                "train": {
                    "steps": 1000,
                    "global_batch_size": rows,
                    "micro_batch_size": 1,
                    "recompute": recompute,
                },
                "checkpoint": {"load": "none"},
            }

        layouts: dict[str, dict[str, Any]] = {method: {"cp": ranks, "context": method} for method in METHODS}
        progress("memory of one process")
        one = _measured({"memory": [config(recompute, 1) for recompute in RECOMPUTE]}, ranks=1)["memory"]
        progress(f"memory of {ranks} ranks")
        parts = [config(recompute, 1, **parallel) for parallel in layouts.values() for recompute in RECOMPUTE]
        split = _measured({"memory": parts}, ranks=ranks)["memory"]
        compared: list[dict[str, Any]] = [{"dp": ranks, "zero": 0}, *layouts.values()]
        timed = [config(RECOMPUTE[0], ranks, **parallel) for parallel in compared]
        ring = config(RECOMPUTE[0], 1, cp=PAIR, context="ring")
        measured_rows, pairs = [], []
        for number in range(1, rounds + 1):
            progress(f"steps, round {number} of {rounds}")
            measured_rows.append(_measured({**protocol, "steps_of": timed}, ranks=ranks)["seconds"])
            pairs.append(_measured({**protocol, "steps_of": [ring]}, ranks=PAIR))
    rows = memory_rows(one, split, ranks) + time_rows(measured_rows, pairs, ranks)
    return {
        "threads": 1,
        "config": {"model": model},
        "protocol": protocol,
        "results": rows,
        "targets": targets(rows),
    }


def _measured(spec: dict[str, Any], ranks: int) -> dict[str, Any]:
    return report.launch("benchmarks.context_run", spec, ranks=ranks, threads=1)


def memory_rows(one: list[int], split: list[int], ranks: int) -> list[dict[str, Any]]:
    """Return rows for one process, then for each method, in the order of RECOMPUTE."""
    rows = [
        {"layout": "one process", "recompute": mode, "peak_mib": size / 2**20}
        for mode, size in zip(RECOMPUTE, one, strict=True)
    ]
    names = [(method, mode, whole) for method in METHODS for mode, whole in zip(RECOMPUTE, one, strict=True)]
    for (method, mode, whole), size in zip(names, split, strict=True):
        rows.append(
            {
                "layout": f"cp {ranks}, {method}",
                "recompute": mode,
                "peak_mib": size / 2**20,
                "of_one_process": size / whole,
            }
        )
    return rows


def time_rows(
    rounds: list[list[list[float]]], pairs: list[dict[str, Any]], ranks: int
) -> list[dict[str, Any]]:
    """Return rows for dp, for each method, and for the ring of two ranks: medians over steps and rounds."""
    names = [f"dp {ranks}", *(f"cp {ranks}, {method}" for method in METHODS)]
    rows: list[dict[str, Any]] = []
    if not rounds:  # memory alone, which load does not change
        return rows
    for index, name in enumerate(names):
        row = _timed_row(name, [each[index] for each in rounds])
        rows.append(row | ({"of_dp": row["ms_per_step"] / rows[0]["ms_per_step"]} if rows else {}))
    alone = _timed_row(f"cp {PAIR}, ring, one row", [each["seconds"][0] for each in pairs])
    return [*rows, alone | {"hidden": median(each["hidden"][0] for each in pairs)}]


def _timed_row(layout: str, seconds: list[list[float]]) -> dict[str, Any]:
    step_ms = [1e3 * value for each in seconds for value in each]
    return {"layout": layout, "recompute": RECOMPUTE[0], "ms_per_step": median(step_ms), "step_ms": step_ms}


def targets(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    judged_rows = []
    for row in rows:
        if "of_one_process" in row:
            most = MOST[row["layout"].split(", ")[1]]
            judged = {
                "measured": row["of_one_process"],
                "wanted": f"≤ {most}",
                "met": row["of_one_process"] <= most,
            }
            judged_rows.append({"target": f"memory, {row['layout']}, recompute {row['recompute']}", **judged})
    return judged_rows
