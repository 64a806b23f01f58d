"""A training step of a 25M Llama, compared with transformers' LlamaForCausalLM with torch's fused AdamW.

Every measured run is a separate process, and the runs alternate, so that a machine that slows down affects
all of them. transformers runs with its defaults and with the matrix-multiply setting that megalite's CPU
backend selects, which alone makes a large difference on some processors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import report
from megalite.config.load import from_dict
from megalite.model.cost.flops import model_flops_per_token

MODEL = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}
SMOKE_MODEL = {
    **MODEL,
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "max_position_embeddings": 16,
}
BREAKDOWN = {  # measured by breakdown_run.py
    "products": "products_ms:,.1f",
    "bytes": "bytes_ms:,.1f",
    "waiting": "waiting_ms:,.1f",
    "sockets": "sockets_ms:,.1f",
    "calls": "calls_ms:,.1f",
    "rest": "rest_ms:,.1f",
    "floor/step": "floor_share:.0%",
}
# of the peer: torch.set_float32_matmul_precision is not called (None), or called with the value
SETTINGS = (None, "medium")
COLUMNS = {
    "run": "run",
    "fp32 products": "matmul",
    "ms/step": "ms_per_step:,.1f",
    "tokens/s": "tokens_per_second:,.0f",
    "model GFLOP/s": "model_gflops:,.1f",
    "peak GFLOP/s": "peak_gflops:,.1f",
    "share": "share_of_peak:.1%",
    "peak RSS above import, MiB": "peak_rss_above_import_mib:,.0f",
    **BREAKDOWN,
}


def medians(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the median of each part of a step over several runs."""
    return {name: median(times[name] for times in parts) for name in parts[0]}


@dataclass
class StepRun:
    """One of the compared runs, with one result per round."""

    peer: bool
    precision: str
    compiled: bool
    setting: str | None = None
    results: list[dict[str, Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        name = "transformers" if self.peer else "megalite"
        return f"{name} {self.precision}{' compiled' if self.compiled else ''}"

    @property
    def matmul(self) -> str:
        """Matrix-multiply setting that was active."""
        return str(self.results[0]["matmul"])


def compare(
    *,
    rounds: int,
    threads: int,
    precisions: list[str],
    compiled: bool,
    smoke: bool,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Run all measurements, and return the figures with their conditions."""
    runs = [
        run
        for each in precisions
        for state in ([False, True] if compiled else [False])
        for run in _runs(each, state)
    ]
    model, batch = (SMOKE_MODEL, 2) if smoke else (MODEL, 4)
    protocol = {
        "rounds": rounds,
        "warmup_steps": 1 if smoke else 2,
        "steps": 2 if smoke else 6,
        "peak_size": 128 if smoke else 2048,
    }
    with TemporaryDirectory(prefix="megalite_benchmark_") as scratch:
        config = config_of(model, batch, Path(scratch))
        for number in range(1, rounds + 1):
            for run in runs:
                progress(
                    f"round {number} of {rounds}: "
                    f"{run.name}{f', products at {run.setting}' if run.setting else ''}"
                )
                run.results.append(_measure(run, config, protocol, threads))
    rows = summarise(runs, config)
    shape = {
        "model": model,
        "sequence_length": config["data"]["sequence_length"],
        "batch_size": batch,
        "optimizer": "AdamW",
        "grad_clip": 1.0,
    }
    return {
        "threads": threads,
        "config": shape,
        "protocol": protocol,
        "results": rows,
        "targets": targets(rows),
    }


def _runs(precision: str, compiled: bool) -> Iterator[StepRun]:
    yield StepRun(False, precision, compiled)
    for setting in SETTINGS:
        yield StepRun(True, precision, compiled, setting)


def config_of(model: dict[str, Any], batch: int, scratch: Path) -> dict[str, Any]:
    length = model["max_position_embeddings"]
    return {
        "run": {"dir": str(scratch), "name": "step"},
        "model": model,
        "parallel": {"tp": 1, "pp": 1, "dp": 1},
        "data": {
            "train": report.write_random_tokens(scratch, model["vocab_size"], 64 * batch * length),
            "sequence_length": length,
        },
        "train": {"steps": 1000, "global_batch_size": batch, "micro_batch_size": batch, "grad_clip": 1.0},
        "checkpoint": {"load": "none"},
    }


def _measure(run: StepRun, config: dict[str, Any], protocol: dict[str, Any], threads: int) -> dict[str, Any]:
    train = {**config["train"], "precision": run.precision, "compile": run.compiled}
    spec = {
        **protocol,
        "config": {**config, "train": train},
        "product_steps": 2,
        "breakdown": True,
        "matmul": run.setting,
    }
    return report.launch(
        "benchmarks.transformers_peer" if run.peer else "benchmarks.trainer_run", spec, threads=threads
    )


def summarise(runs: list[StepRun], config: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row of figures per run: medians over all steps of all rounds.

    The peak is the best of all processes with a setting.
    """
    parsed = from_dict(config)
    length, tokens = parsed.data.sequence_length, parsed.train.global_batch_size * parsed.data.sequence_length
    flops = tokens * model_flops_per_token(parsed.model, length)
    peaks: dict[tuple[str, str], float] = {}
    for run in runs:
        key = (run.precision, run.matmul)
        peaks[key] = max(peaks.get(key, 0.0), *(result["peak_flops"] for result in run.results))
    rows = []
    for run in runs:
        seconds = median(value for result in run.results for value in result["seconds"])
        memory = [
            result["peak_rss_above_import"]
            for result in run.results
            if result["peak_rss_above_import"] is not None
        ]
        peak = peaks[run.precision, run.matmul]
        rows.append(
            {
                "run": run.name,
                "precision": run.precision,
                "compiled": run.compiled,
                "matmul": run.matmul,
                "peer": run.peer,
                "ms_per_step": 1e3 * seconds,
                "tokens_per_second": tokens / seconds,
                "model_gflops": flops / seconds / 1e9,
                "peak_gflops": peak / 1e9,
                "share_of_peak": flops / seconds / peak,
                "peak_rss_above_import_mib": median(memory) / 2**20 if memory else None,
                "step_ms": [[1e3 * value for value in result["seconds"]] for result in run.results],
                **({} if run.peer else medians([result["parts"] for result in run.results])),
            }
        )
    return rows


def targets(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the targets of eager fp32, and whether they are met."""
    eager = [row for row in rows if row["precision"] == "fp32" and not row["compiled"]]
    own = next((row for row in eager if not row["peer"]), None)
    if own is None:
        return []
    peers = [row for row in eager if row["peer"]]
    same = next(row for row in reversed(peers) if row["matmul"] == own["matmul"])
    judged = [
        _target(
            "speed / transformers at its defaults",
            own["tokens_per_second"] / peers[0]["tokens_per_second"],
            at_least=1.5,
        ),
        _target(
            "speed / transformers at the same setting",
            own["tokens_per_second"] / same["tokens_per_second"],
            at_least=1.0,
        ),
    ]
    memory = "peak_rss_above_import_mib"
    if own[memory] is not None:
        ratio = own[memory] / min(row[memory] for row in peers)
        judged.append(_target("peak RSS above import / transformers", ratio, at_most=0.85))
    return judged


def _target(
    name: str, value: float, at_least: float | None = None, at_most: float | None = None
) -> dict[str, Any]:
    met = value >= at_least if at_least is not None else at_most is not None and value <= at_most
    return {
        "target": name,
        "measured": value,
        "wanted": f"≥ {at_least}" if at_least is not None else f"≤ {at_most}",
        "met": met,
    }
