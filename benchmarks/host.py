"""The host's part of a step: small Llama models, compared with transformers' LlamaForCausalLM.

Where tensors are small, a step takes as long as the host takes to start its operations. Rows of 32 tokens in
fp32 are trained with clipping, on one thread. transformers' loop has torch's fused AdamW and
clip_grad_norm_, with its defaults. Both programs run in one process and alternate step by step; a ratio is
the median over such pairs. What a layer costs is the difference of two depths: processor time, autograd nodes
and ATen operations. On two ranks only megalite runs, and the processor time of a rank tells what the host
does, the wall time also how long it waits. What a layer starts on a GPU is counted without one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import report

WIDTHS, BATCHES = (64, 128, 256, 512, 1024), (1, 2, 4, 8)
LENGTH = 32  # tokens of a row
LAYOUTS: dict[str, dict[str, int]] = {"TP2": {"tp": 2}, "PP2": {"pp": 2}}
"""Measured with the narrowest model and its smallest batch, beside one process."""
CONVENTION = (
    "Of two numbers, the first is megalite's, the second transformers'. time/theirs, processor/theirs: "
    "medians over alternating steps, of wall time and of processor time, which other load affects less. "
    "processor: of one rank. A layer is the difference of two depths: processor time, autograd nodes, calls "
    "of ATen that compute, and views."
)
COLUMNS = {
    "model": "model",
    "layout": "layout",
    "tokens": "tokens",
    "ms/step": "ms_per_step:,.1f",
    "transformers": "peer_ms_per_step:,.1f",
    "time/theirs": "ratio:.3f",
    "quartiles": "quartiles",
    "processor, ms": "processor_ms",
    "processor/theirs": "processor_ratio:.3f",
    "layer, µs": "us",
    "nodes": "nodes",
    "operations": "operations",
    "views": "views",
}
LAYER_COLUMNS = {
    "a layer on a GPU, bf16": "program",
    "kernels": "kernels",
    "Triton's": "triton",
    "operations": "operations",
    "views": "views",
    "nodes": "nodes:g",
    "host, µs": "us_per_layer:,.0f",
}
LAYER_CONVENTION = (
    "Counted without a GPU, forward + backward; kernels: Triton's launches and operations that compute; "
    "host: processor time on this CPU, with Triton's kernels left out and tiny operations of torch."
)


@dataclass
class HostRun:
    """A model on a layout, with one result per round."""

    width: int
    batch: int
    layout: str = "one process"
    layers: tuple[int, int] = (0, 0)  # of the measured model, and of the one whose times are subtracted
    steps: tuple[int, int] = (5, 30)  # warm-up, timed
    results: list[dict[str, Any]] = field(default_factory=list)

    @property
    def alone(self) -> bool:
        return self.layout in LAYOUTS

    @property
    def name(self) -> str:
        return f"{self.layers[0]} layers of width {self.width}"

    def config(self, scratch: Path) -> dict[str, Any]:
        return {
            "run": {"dir": str(scratch), "name": "host"},
            "model": model_of(self.width, self.layers[0]),
            "parallel": {"tp": 1, "pp": 1, "dp": 1, **LAYOUTS.get(self.layout, {})},
            "data": {
                "train": report.write_random_tokens(scratch, 256, 64 * self.batch * LENGTH),
                "sequence_length": LENGTH,
            },
            "train": {
                "steps": 1000,
                "global_batch_size": self.batch,
                "micro_batch_size": self.batch,
                "grad_clip": 1.0,
            },
            "checkpoint": {"load": "none"},
        }

    def measure(self, scratch: Path, threads: int) -> None:
        spec = {
            "config": self.config(scratch),
            "layers": self.layers,
            "warmup_steps": self.steps[0],
            "steps": self.steps[1],
            "matmul": "highest",  # torch's default, for both programs
            "peer": not self.alone,
        }
        self.results.append(
            report.launch("benchmarks.host_run", spec, ranks=2 if self.alone else 1, threads=threads)
        )

    def row(self) -> dict[str, Any]:
        """Return the medians over all steps of all rounds."""
        own, tokens = [result["own"] for result in self.results], self.batch * LENGTH
        row = {"model": self.name, "layout": self.layout, "width": self.width, "layers": self.layers}
        row |= {"tokens": tokens, **self._times("", own)}
        if self.alone:
            return row
        peer = [result["peer"] for result in self.results]
        row |= self._times("peer_", peer)
        for prefix, name in (("", "seconds"), ("processor_", "processor_seconds")):
            pairs = zip(_joined(own, name), _joined(peer, name), strict=True)
            ratios = [ours / theirs for ours, theirs in pairs]
            low, _, high = quantiles(ratios, n=4)
            row |= {f"{prefix}ratio": median(ratios), f"{prefix}quartiles": f"{low:.3f}–{high:.3f}"}
        row["pairs"] = len(ratios)
        return row | {"counts": own[0]["counts"], "peer_counts": peer[0]["counts"]}

    def _times(self, prefix: str, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
        # a pipeline rank has its part of the layers
        layers = (self.layers[0] - self.layers[1]) / LAYOUTS.get(self.layout, {}).get("pp", 1)
        deep, shallow = (
            median(_joined(results, name)) for name in ("processor_seconds", "shallow_processor_seconds")
        )
        return {
            f"{prefix}ms_per_step": 1e3 * median(_joined(results, "seconds")),
            f"{prefix}processor_ms_per_step": 1e3 * deep,
            f"{prefix}us_per_layer": 1e6 * (deep - shallow) / layers,
            f"{prefix}step_ms": [[1e3 * value for value in result["seconds"]] for result in results],
        }


def model_of(width: int, layers: int) -> dict[str, Any]:
    """Return a Llama with 4 heads, or more, of at most 64 channels."""
    return {
        "vocab_size": 256,
        "hidden_size": width,
        "intermediate_size": width * 11 // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": max(4, width // 64),
        "max_position_embeddings": LENGTH,
    }


def runs(widths: Sequence[int], batches: Sequence[int], smoke: bool) -> list[HostRun]:
    """Return the runs. Wide models have fewer layers and steps, so that none takes long."""
    if smoke:
        small: dict[str, Any] = {"layers": (4, 2), "steps": (1, 2)}
        return [HostRun(16, 1, layout, **small) for layout in ("one process", *LAYOUTS)]

    def run(width: int, batch: int, layout: str = "one process") -> HostRun:
        layers = min(32, max(2, 2048 // width))
        return HostRun(width, batch, layout, (layers, layers // 2), (5, 30 if width <= 256 else 10))

    return [
        *(run(width, batch) for width in widths for batch in batches),
        *(run(min(widths), min(batches), layout) for layout in LAYOUTS),
    ]


def layer_on_gpu(smoke: bool) -> list[dict[str, Any]]:
    """Return what a layer starts on a GPU, for each program (`launches_run`); nothing without Triton."""
    if find_spec("triton") is None:
        return []
    run = HostRun(32, 1, layers=(2, 1) if smoke else (16, 8))
    with TemporaryDirectory(prefix="megalite_benchmark_") as scratch:
        config = run.config(Path(scratch))
        config["train"] |= {"precision": "bf16", "kernels": "triton"}
        spec = {
            "config": config,
            "layers": run.layers,
            "warmup_steps": 1 if smoke else 3,
            "steps": 1 if smoke else 12,
        }
        result = report.launch("benchmarks.launches_run", spec, threads=1)
    return [{"program": program, **figures} for program, figures in result.items()]


def compare(
    *,
    rounds: int,
    threads: int,
    smoke: bool,
    progress: Callable[[str], None],
    widths: Sequence[int] = WIDTHS,
    batches: Sequence[int] = BATCHES,
) -> dict[str, Any]:
    """Run all measurements, and return the figures with their conditions."""
    compared = runs(widths, batches, smoke)
    with TemporaryDirectory(prefix="megalite_benchmark_") as scratch:
        for number in range(1, rounds + 1):
            for run in compared:
                progress(f"round {number} of {rounds}: {run.name}, batch {run.batch}, {run.layout}")
                run.measure(Path(scratch), threads)
    progress("a layer on a GPU")
    return {
        "threads": threads,
        "protocol": {"rounds": rounds, "matmul": "highest", "precision": "fp32", "grad_clip": 1.0},
        "results": [run.row() for run in compared],
        "layer": layer_on_gpu(smoke),
        "targets": [],
        "convention": CONVENTION,
    }


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with the columns of a layer, of both programs, as text."""
    own, peer = row.get("counts"), row.get("peer_counts")
    text = {}
    for column, name, style in (
        ("processor_ms", "processor_ms_per_step", ",.1f"),
        ("us", "us_per_layer", ",.0f"),
    ):
        text[column] = " / ".join(format(row[key], style) for key in (name, f"peer_{name}") if key in row)
    if own and peer:
        for column, names in (
            ("nodes", ["nodes"]),
            ("operations", ["operations_forward", "operations_backward"]),
            ("views", ["views_forward", "views_backward"]),
        ):
            text[column] = " / ".join(f"{sum(each[name] for name in names):g}" for each in (own, peer))
    return row | text


def shown_layer(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of `layer_on_gpu` with the numbers of forward and backward as text."""

    def both(*kinds: str) -> str:
        return " + ".join(
            f"{sum(row[f'{kind}_{name}'] for kind in kinds):g}" for name in ("forward", "backward")
        )

    kernels = {"kernels": both("kernels", "operations"), "triton": both("kernels")}
    return row | kernels | {"operations": both("operations"), "views": both("views")}


def _joined(results: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [value for result in results for value in result[name]]
