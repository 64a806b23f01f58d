"""A training step on one GPU, compared with transformers' LlamaForCausalLM under torch.compile.

Both have the same shape, batch and clipping: Llama 3.2 1B at 4,096 tokens, and some layers of Llama 3 8B with
its full embedding and head at 8,192. Every run is a separate process. transformers is measured in pure bf16,
its fastest setting, which keeps neither fp32 weights nor fp32 moments, and, if there is enough time, in mixed
precision, which updates fp32 weights like megalite.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import report
from megalite.config.load import from_dict
from megalite.families.presets import preset
from megalite.model.cost.flops import model_flops_per_token
from megalite.planner.api import peak_flops

SECONDS, LONGEST = 560.0, 240.0  # time limits of all runs together, and of one
COLUMNS = {
    "model": "model",
    "run": "run",
    "ms/step": "ms_per_step:,.1f",
    "tokens/s": "tokens_per_second:,.0f",
    "model TFLOP/s": "model_tflops:,.0f",
    "MFU": "mfu:.1%",
    "MFU, causal": "mfu_causal:.1%",
    "share of products": "share_of_peak:.1%",
    "peak allocated, GiB": "peak_allocated_gib:,.1f",
    "error": "error",
}
CONVENTION = (
    "MFU: model FLOPs over the data sheet's dense bf16 peak. Attention counts every position, as in PaLM and "
    "Megatron-LM, though a causal "
    "mask needs half of them; the causal MFU counts that half. Share of products: over the fastest large "
    "bf16 product of this device."
)


@dataclass(frozen=True)
class TrainedShape:
    """The trained model: a preset, possibly with fewer layers, and one microbatch per step."""

    name: str
    preset: str
    length: int
    batch: int
    layers: int | None = None

    def config(self, scratch: Path, smoke: bool, document: int | None = None) -> dict[str, Any]:
        """Return the configuration.

        Args:
            document: tokens of each document; None if rows are not divided.
        """
        tiny = {
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
        model = preset(self.preset) | ({} if self.layers is None else {"num_hidden_layers": self.layers})
        model |= {**tiny, "head_dim": 8, "num_hidden_layers": 1} if smoke else {}
        length = 16 if smoke else self.length
        prefix = report.write_random_tokens(scratch, model["vocab_size"], 64 * self.batch * length, document)
        return {
            "run": {"dir": str(scratch), "name": "step"},
            "model": model,
            "parallel": {"tp": 1, "pp": 1, "dp": 1},
            "data": {"train": prefix, "sequence_length": length, "reset_positions": document is not None},
            "train": {
                "steps": 1000,
                "global_batch_size": self.batch,
                "micro_batch_size": self.batch,
                "grad_clip": 1.0,
                "precision": "bf16",
            },
            "checkpoint": {"load": "none"},
        }


@dataclass(frozen=True)
class GpuStepRun:
    """One of the compared runs."""

    name: str
    module: str
    compiled: bool
    weights: str | None = None  # of the peer


SHAPES = (
    TrainedShape("Llama 3.2 1B", "llama-3.2-1b", 4096, 4),
    TrainedShape("6 layers of Llama 3 8B", "llama-3-8b", 8192, 2, layers=6),
)
OURS = GpuStepRun("megalite", "benchmarks.trainer_run", False)
OURS_COMPILED = GpuStepRun("megalite compiled", "benchmarks.trainer_run", True)
PEER = GpuStepRun("transformers compiled, all bf16", "benchmarks.transformers_peer", True, "bf16")
MIXED_PEER = GpuStepRun("transformers compiled, mixed", "benchmarks.transformers_peer", True)


def plan(compiled: bool) -> list[tuple[TrainedShape, GpuStepRun]]:
    """Return the runs in order of importance. The last ones are skipped if there is not enough time."""
    last = [OURS_COMPILED, MIXED_PEER] if compiled else [MIXED_PEER]
    return [(shape, run) for runs in ([OURS, PEER], last) for shape in SHAPES for run in runs]


def compare(
    *,
    threads: int,
    smoke: bool,
    compiled: bool,
    save: Callable[[dict[str, Any]], Path],
    progress: Callable[[str], None],
) -> Path:
    """Run all measurements, and write the results after each run."""
    ends, rows, path = time.monotonic() + SECONDS, list[dict[str, Any]](), Path()
    protocol = {
        "warmup_steps": 1 if smoke else 3,
        "steps": 2 if smoke else 8,
        "peak_size": 128 if smoke else 8192,
        "product_steps": 0,
    }
    with TemporaryDirectory(prefix="megalite_benchmark_") as scratch:
        configs = {shape.name: shape.config(Path(scratch), smoke) for shape in SHAPES}
        for shape, run in plan(compiled):
            progress(f"{shape.name}: {run.name}")
            train = {**configs[shape.name]["train"], "compile": run.compiled and not smoke}
            config = {**configs[shape.name], "train": train}
            spec = {
                **protocol,
                "config": config,
                "matmul": None,
                "weights": run.weights,
                "device": "cpu" if smoke else "cuda",
            }
            rows.append(_measured(shape, run, spec, threads, ends - time.monotonic()))
            progress(
                f"    {rows[-1]['error'] or format(rows[-1]['tokens_per_second'], ',.0f') + ' tokens/s'}"
            )
            path = save(_content(rows, protocol))
    return path


def _measured(
    shape: TrainedShape, run: GpuStepRun, spec: dict[str, Any], threads: int, left: float
) -> dict[str, Any]:
    row: dict[str, Any] = {"model": shape.name, "run": run.name, "error": None}
    if left < 30:
        return {**row, "error": "not measured: out of time"}
    try:
        result = report.launch(run.module, spec, threads=threads, limit_s=min(left, LONGEST))
    except report.BenchmarkError as error:
        lines = str(error).strip().splitlines()
        return {**row, "error": f"{lines[0]} {lines[-1]}"[:500]}
    return row | figures(spec["config"], result)


def figures(config: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a run, computed from its times."""
    parsed = from_dict(config)
    model, length, seconds = parsed.model, parsed.data.sequence_length, median(result["seconds"])
    tokens = parsed.train.global_batch_size * length / seconds
    flops = model_flops_per_token(model, length)
    # half of attention's FLOPs
    unseen = 6.0 * model.num_hidden_layers * length * model.num_attention_heads * model.head_size
    peak = peak_flops(result["device"], "bf16") if result["device"] else None
    return {
        "device": result["device"],
        "ms_per_step": 1e3 * seconds,
        "tokens_per_second": tokens,
        "model_tflops": tokens * flops / 1e12,
        "mfu": tokens * flops / peak if peak else None,
        "mfu_causal": tokens * (flops - unseen) / peak if peak else None,
        "share_of_peak": tokens * flops / result["peak_flops"],
        "peak_product_tflops": result["peak_flops"] / 1e12,
        "peak_allocated_gib": result["peak_allocated"] / 2**30 if result["peak_allocated"] else None,
        "peak_reserved_gib": result["peak_reserved"] / 2**30 if result["peak_reserved"] else None,
        "attention": result.get("attention"),
        "step_ms": [1e3 * value for value in result["seconds"]],
    }


def _content(rows: list[dict[str, Any]], protocol: dict[str, Any]) -> dict[str, Any]:
    device = next((row["device"] for row in rows if row.get("device")), None)
    shapes = [
        {
            "name": each.name,
            "preset": each.preset,
            "layers": each.layers,
            "length": each.length,
            "batch": each.batch,
        }
        for each in SHAPES
    ]
    return {
        "device": {"name": device},
        "convention": CONVENTION,
        "shapes": shapes,
        "protocol": protocol,
        "results": rows,
        "targets": targets(rows),
    }


def targets(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the targets: a fraction of the GPU's peak, and a speedup over transformers."""
    judged = []
    measured = {(row["model"], row["run"]): row for row in rows if not row["error"]}
    for shape in SHAPES:
        own, peer = (measured.get((shape.name, run.name)) for run in (OURS, PEER))
        if own and own["mfu"] is not None:
            judged.append(
                {
                    "target": f"MFU, {shape.name}",
                    "measured": own["mfu"],
                    "wanted": "≥ 0.45",
                    "met": own["mfu"] >= 0.45,
                }
            )
        if own and peer:
            ratio = own["tokens_per_second"] / peer["tokens_per_second"]
            judged.append(
                {
                    "target": f"speed / {PEER.name}, {shape.name}",
                    "measured": ratio,
                    "wanted": "≥ 1.15",
                    "met": ratio >= 1.15,
                }
            )
    return judged
