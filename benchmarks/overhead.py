"""Small models, in which the overhead around matmuls dominates.

They are a character model on one process and a small Llama on five layouts. Each run uses the trainer on
random tokens. Its speed is compared with that of its matmuls alone, which the same ranks measure right after
it: the ratio shows the cost of everything else, including communication. With several ranks each has one
thread, so that on a machine with two cores the layouts share the cores of one process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import report
from benchmarks.step import BREAKDOWN, medians

GPT = {  # nanoGPT's settings for a CPU: no biases, tied embeddings, no dropout
    "vocab_size": 65,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "position": "learned",
    "norm": "layer",
    "hidden_act": "gelu",
    "gated_mlp": False,
    "tie_word_embeddings": True,
}
LLAMA = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
SMALLER = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "max_position_embeddings": 8,
}
COLUMNS = {
    "model": "model",
    "layout": "layout",
    "ranks": "ranks",
    "threads": "threads_per_rank",
    "ms/step": "ms_per_step:,.1f",
    "tokens/s": "tokens_per_second:,.0f",
    "share": "share_of_products:.1%",
    **BREAKDOWN,
}


@dataclass
class OverheadRun:
    """A model on a layout, with one result per round."""

    name: str
    model: dict[str, Any]
    batch: tuple[int, int]  # global, micro
    steps: tuple[int, int]  # warm-up, timed
    layout: dict[str, int] = field(default_factory=dict)
    results: list[dict[str, Any]] = field(default_factory=list)

    @property
    def ranks(self) -> int:
        return self.layout.get("tp", 1) * self.layout.get("pp", 1) * self.layout.get("dp", 1)

    @property
    def layout_name(self) -> str:
        return (
            "×".join(f"{axis.upper()}{size}" for axis, size in self.layout.items() if axis != "zero")
            or "one process"
        )


def runs(smoke: bool) -> list[OverheadRun]:
    if smoke:
        tiny = OverheadRun("llama", LLAMA | SMALLER, (4, 2), (1, 2), {"tp": 2})
        return [OverheadRun("gpt", GPT | SMALLER, (4, 4), (1, 2)), tiny]
    layouts: list[dict[str, int]] = [{}, {"dp": 2}, {"pp": 2}, {"tp": 2}, {"tp": 2, "pp": 2, "dp": 2}]
    return [
        OverheadRun("gpt", GPT, (12, 12), (20, 100)),
        *(OverheadRun("llama", LLAMA, (64, 4), (2, 6), layout) for layout in layouts),
    ]


def compare(*, rounds: int, threads: int, smoke: bool, progress: Callable[[str], None]) -> dict[str, Any]:
    """Run all measurements alternately, and return the figures with their conditions."""
    compared = runs(smoke)
    with TemporaryDirectory(prefix="megalite_benchmark_") as scratch:
        configs = [config_of(run, Path(scratch)) for run in compared]
        for number in range(1, rounds + 1):
            for run, config in zip(compared, configs, strict=True):
                progress(f"round {number} of {rounds}: {run.name}, {run.layout_name}")
                warmup, steps = run.steps
                spec = {
                    "config": config,
                    "warmup_steps": warmup,
                    "steps": steps,
                    "product_steps": steps,
                    "breakdown": True,
                    "peak_size": 128 if smoke else 1024,
                }
                run.results.append(
                    report.launch(
                        "benchmarks.trainer_run",
                        spec,
                        ranks=run.ranks,
                        threads=threads if run.ranks == 1 else 1,
                    )
                )
    rows = [_row(run, threads) for run in compared]
    return {"threads": threads, "protocol": {"rounds": rounds}, "results": rows, "targets": targets(rows)}


def config_of(run: OverheadRun, scratch: Path) -> dict[str, Any]:
    """Return the configuration of a run, on random tokens in `scratch`."""
    length = run.model["max_position_embeddings"]
    total, micro = run.batch
    return {
        "run": {"dir": str(scratch), "name": run.name},
        "model": run.model,
        "parallel": {"tp": 1, "pp": 1, "dp": 1, **run.layout},
        "data": {
            "train": report.write_random_tokens(scratch, run.model["vocab_size"], 16 * total * length),
            "sequence_length": length,
        },
        "train": {"steps": 1000, "global_batch_size": total, "micro_batch_size": micro},
        "checkpoint": {"load": "none"},
    }


def _row(run: OverheadRun, threads: int) -> dict[str, Any]:
    """Return the figures of a run (medians over all steps of all rounds) and its configuration."""
    seconds, matmul_seconds = (
        median(value for result in run.results for value in result[key])
        for key in ("seconds", "product_seconds")
    )
    length = run.model["max_position_embeddings"]
    tokens = run.batch[0] * length
    return {
        "model": run.name,
        "layout": run.layout_name,
        "ranks": run.ranks,
        "threads_per_rank": threads if run.ranks == 1 else 1,
        "matmul": run.results[0]["matmul"],
        "ms_per_step": 1e3 * seconds,
        "tokens_per_second": tokens / seconds,
        "product_tokens_per_second": tokens / matmul_seconds,
        "share_of_products": matmul_seconds / seconds,
        **medians([result["parts"] for result in run.results]),
        "step_ms": [[1e3 * value for value in result["seconds"]] for result in run.results],
        "config": {
            "model": run.model,
            "precision": "fp32",
            "sequence_length": length,
            "global_batch_size": run.batch[0],
            "micro_batch_size": run.batch[1],
        },
    }


def targets(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the target.

    All three axes together must keep most of the speed of data parallelism on the same cores.
    """
    speed = {row["layout"]: row["tokens_per_second"] for row in rows if row["model"] == "llama"}
    if not {"TP2×PP2×DP2", "DP2"} <= speed.keys():
        return []
    ratio = speed["TP2×PP2×DP2"] / speed["DP2"]
    return [
        {"target": "speed of TP2×PP2×DP2 / DP2", "measured": ratio, "wanted": "≥ 0.7", "met": ratio >= 0.7}
    ]
