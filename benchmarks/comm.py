"""A data-parallel step on four ranks, compared with DDP + ZeroRedundancyOptimizer and with FSDP2.

All runs use the same 25M Llama, AdamW, clipping and matrix-multiply setting, and short sequences so that
communication matters. Every run has its own process group, and the runs alternate. megalite runs with ZeRO-1,
which shards the same as DDP's peer, and with ZeRO-3, which shards the same as FSDP2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import report
from benchmarks.step import MODEL, SMOKE_MODEL

RANKS = 4
COLUMNS = {
    "run": "run",
    "shards": "shards",
    "ms/step": "ms_per_step:,.1f",
    "tokens/s": "tokens_per_second:,.0f",
    "peak RSS of a rank above import, MiB": "peak_rss_above_import_mib:,.0f",
}


@dataclass
class CommRun:
    """One of the compared runs, with one result per round."""

    name: str
    shards: str
    zero: int | None = None  # of megalite
    peer: str | None = None
    results: list[dict[str, Any]] = field(default_factory=list)


def compare(*, rounds: int, threads: int, smoke: bool, progress: Callable[[str], None]) -> dict[str, Any]:
    """Run all measurements, and return the figures with their conditions."""
    runs = [
        CommRun("megalite, ZeRO-1", "optimizer", zero=1),
        CommRun("DDP + ZeroRedundancyOptimizer", "optimizer", peer="ddp"),
        CommRun("megalite, ZeRO-3", "everything", zero=3),
        CommRun("FSDP2", "everything", peer="fsdp2"),
    ]
    model, length, ranks = (SMOKE_MODEL, 16, 2) if smoke else (MODEL, 64, RANKS)
    protocol = {
        "warmup_steps": 1 if smoke else 2,
        "steps": 2 if smoke else 8,
        "peak_size": 128,
        "product_steps": 1,
        "matmul": "medium",
    }
    with TemporaryDirectory(prefix="megalite_benchmark_") as scratch:
        config = config_of(model, length, ranks, Path(scratch))
        for number in range(1, rounds + 1):
            for run in runs:
                progress(f"round {number} of {rounds}: {run.name}")
                own = {**config, "parallel": {**config["parallel"], "zero": run.zero or 0}}
                module = "benchmarks.trainer_run" if run.peer is None else "benchmarks.sharded_peer"
                spec = {**protocol, "config": own, "peer": run.peer}
                run.results.append(report.launch(module, spec, ranks=ranks, threads=1))
    rows = [_row(run, ranks * length) for run in runs]
    shape = {
        "model": model,
        "sequence_length": length,
        "batch_size": ranks,
        "bucket_mb": 25.0,
        "optimizer": "AdamW",
    }
    return {
        "threads": 1,
        "ranks": ranks,
        "config": shape,
        "protocol": {**protocol, "rounds": rounds},
        "results": rows,
        "targets": targets(rows),
    }


def config_of(model: dict[str, Any], length: int, ranks: int, scratch: Path) -> dict[str, Any]:
    return {
        "run": {"dir": str(scratch), "name": "comm"},
        "model": model,
        "parallel": {"tp": 1, "pp": 1, "dp": ranks, "bucket_mb": 25.0},
        "data": {
            "train": report.write_random_tokens(scratch, model["vocab_size"], 64 * ranks * length),
            "sequence_length": length,
        },
        "train": {"steps": 1000, "global_batch_size": ranks, "micro_batch_size": 1, "grad_clip": 1.0},
        "checkpoint": {"load": "none"},
    }


def _row(run: CommRun, tokens: int) -> dict[str, Any]:
    seconds = median(value for result in run.results for value in result["seconds"])
    memory = [
        result["peak_rss_above_import"]
        for result in run.results
        if result["peak_rss_above_import"] is not None
    ]
    return {
        "run": run.name,
        "shards": run.shards,
        "peer": run.peer is not None,
        "ms_per_step": 1e3 * seconds,
        "tokens_per_second": tokens / seconds,
        "peak_rss_above_import_mib": median(memory) / 2**20 if memory else None,
        "step_ms": [[1e3 * value for value in result["seconds"]] for result in run.results],
    }


def targets(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the targets: at least the speed of the peer that shards the same, with at most its memory."""
    judged = []
    for own, peer in zip(rows[::2], rows[1::2], strict=True):
        speed = peer["ms_per_step"] / own["ms_per_step"]
        judged.append(
            {
                "target": f"speed, {own['run']} / {peer['run']}",
                "measured": speed,
                "wanted": "≥ 1.0",
                "met": speed >= 1.0,
            }
        )
        if own["peak_rss_above_import_mib"] and peer["peak_rss_above_import_mib"]:
            memory = own["peak_rss_above_import_mib"] / peer["peak_rss_above_import_mib"]
            judged.append(
                {
                    "target": f"memory, {own['run']} / {peer['run']}",
                    "measured": memory,
                    "wanted": "≤ 1.0",
                    "met": memory <= 1.0,
                }
            )
    return judged
