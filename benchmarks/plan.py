"""The planner compared with this machine: predicted and measured steps of a small Llama on five layouts.

The device is calibrated right before, with the same number of ranks, each with one thread. The two are
independent: calibration measures matmuls, memory bandwidth and collectives; the steps are run by the trainer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import overhead, report
from megalite.commands.parser import write_whole
from megalite.config.load import from_dict
from megalite.planner.api import Device, find_device_by_driver_name, peak_flops, read_device
from megalite.planner.plans import LayoutChoice, PlannedJob, Stepper

COLUMNS = {
    "layout": "layout",
    "ranks": "ranks",
    "measured ms": "measured_ms:,.1f",
    "predicted ms": "predicted_ms:,.1f",
    "predicted / measured": "ratio:.2f",
}
LAYOUTS: tuple[dict[str, int], ...] = (
    {"zero": 0},
    {"tp": 2, "zero": 0},
    {"pp": 2, "zero": 0},
    {"dp": 2, "zero": 0},
    {"dp": 2, "zero": 1},
)
TOLERANCE = 0.25
ON_CPU = {
    "dtype": "float32",
    "sizes": [32, 64, 128, 256, 512, 1024],
    "rows": [512, 256],
    "logits": [512, 2048],
    "attention": [128, 4, 64],
    "messages": [1 << 12, 1 << 23],
}
ON_GPU = {
    "dtype": "bfloat16",
    "sizes": [512, 1024, 2048, 4096, 8192],
    "rows": [8192, 4096],
    "logits": [4096, 32768],
    "attention": [4096, 32, 128],
    "messages": [1 << 16, 1 << 28],
}
SMOKE = {
    "sizes": [16, 32],
    "rows": [16, 16],
    "logits": [16, 32],
    "attention": [16, 2, 8],
    "messages": [1 << 8, 1 << 14],
}


def calibrate(smoke: bool = False, limit_s: float = 1800.0) -> dict[str, Any]:
    """Measure this machine. Return a device in the format of `megalite/planner/hardware/devices.py`."""
    gpus = report.gpus()
    ranks = len(gpus) or 2
    spec: dict[str, Any] = {
        "device": "cuda" if gpus else "cpu",
        "ranks": ranks,
        **(ON_GPU if gpus else ON_CPU),
    }
    measured = report.launch(
        "benchmarks.calibrate", spec | (SMOKE if smoke else {}), ranks=ranks, threads=1, limit_s=limit_s
    )
    return _gpu(measured, gpus) if gpus else _cpu(measured, ranks)


def write_device(path: Path, content: dict[str, Any]) -> None:
    """Write a measured device as a file for --gpu."""
    import yaml

    rounded = json.loads(json.dumps(content), parse_float=lambda text: float(f"{float(text):.4g}"))
    name = report.machine()["cpu"] if content.get("cpu") else content.get("device", "a GPU")
    write_whole(
        path,
        f"# Measured by megalite plan --calibrate on {name}.\n{yaml.safe_dump(rounded, sort_keys=False)}",
    )


def _cpu(measured: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Return the row of hardware.yaml for a CPU.

    The network between machines is not measured, but set to the link inside a machine.
    """
    return {
        **measured,
        "measured": True,
        "multiprocessors": 1,
        "sustained": 1.0,
        "memory_gib": round((report.machine()["memory_gib"] or 4.0) / ranks, 1),
        "between": dict(measured["within"]),
        "gpus_per_node": ranks,
        "host_memory_gbs": measured["memory_gbs"],
        "host": {"gbs": measured["memory_gbs"], "latency_us": 1.0},
        "cpu": True,
        "tflops": {"fp32": max(measured["products"].values()) / 1e3},
        "host_us": 0.0,
    }


def _gpu(measured: dict[str, Any], gpus: Sequence[str]) -> dict[str, Any]:
    """Return the row of hardware.yaml for a GPU.

    Its matmuls are modelled by tiles, at the fraction of its peak that the fastest measured matmul reached.
    If this machine has no network or no second GPU, their values are those of the table or, if the device is
    not in the table, of the host link.
    """
    import torch

    properties, peak, known = (
        torch.cuda.get_device_properties(0),
        peak_flops(gpus[0], "bf16"),
        find_device_by_driver_name(gpus[0]),
    )
    best = max(measured["products"].values()) / 1e3
    own = {"within": known.within, "between": known.between} if known else {}
    links = {
        name: {"gbs": link.bandwidth / 1e9, "latency_us": 1e6 * link.latency} for name, link in own.items()
    }
    peaks = {"fp32": known.peaks["fp32"] / 1e12} if known and "fp32" in known.peaks else {}
    return {
        "within": dict(measured["host"]),
        "between": dict(measured["host"]),
        **links,
        **measured,
        "products": {},
        "measured": True,
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "gpus_per_node": max(known.per_node if known else 1, len(gpus)),
        "device": gpus[0],
        "sustained": best * 1e12 / peak if peak else 1.0,
        "tflops": peaks if peak else {**peaks, "bf16": best, "fp16": best},
        **({"price_per_hour": known.price} if known and known.price else {}),
    }


def compare(*, rounds: int, threads: int, smoke: bool, progress: Callable[[str], None]) -> dict[str, Any]:
    """Calibrate, predict and measure; the measured runs alternate."""
    progress("calibrating")
    content = calibrate(smoke)
    runs = [_run(layout, smoke) for layout in LAYOUTS]
    with TemporaryDirectory(prefix="megalite_benchmark_") as scratch:
        for number in range(1, rounds + 1):
            for run in runs:
                progress(f"round {number} of {rounds}: {run.layout_name}")
                warmup, steps = run.steps
                spec = {
                    "config": overhead.config_of(run, Path(scratch)),
                    "warmup_steps": warmup,
                    "steps": steps,
                    "product_steps": 0,
                }
                run.results.append(
                    report.launch(
                        "benchmarks.trainer_run", spec | {"peak_size": 64}, ranks=run.ranks, threads=1
                    )
                )
    device = read_device("here", json.loads(json.dumps(content)))
    rows = [_row(run, device) for run in runs]
    worst = max(abs(row["ratio"] - 1) for row in rows)
    target = {
        "target": "largest deviation of a prediction",
        "measured": worst,
        "wanted": f"≤ {TOLERANCE}",
        "met": worst <= TOLERANCE,
    }
    return {"calibrated": content, "protocol": {"rounds": rounds}, "results": rows, "targets": [target]}


def _run(layout: dict[str, int], smoke: bool) -> overhead.OverheadRun:
    model = overhead.LLAMA | (overhead.SMALLER if smoke else {})
    return overhead.OverheadRun(
        "llama", model, (4, 2) if smoke else (64, 4), (1, 2) if smoke else (2, 6), layout
    )


def _row(run: overhead.OverheadRun, device: Device) -> dict[str, Any]:
    seconds = median(value for result in run.results for value in result["seconds"])
    predicted = predict(run, device)
    return {
        "layout": run.layout_name + (f" ZeRO-{run.layout['zero']}" if run.layout.get("zero") else ""),
        "ranks": run.ranks,
        "measured_ms": 1e3 * seconds,
        "predicted_ms": 1e3 * predicted,
        "ratio": predicted / seconds,
        "step_ms": [[1e3 * value for value in result["seconds"]] for result in run.results],
    }


def predict(run: overhead.OverheadRun, device: Device) -> float:
    """Return the predicted seconds of a step."""
    config = from_dict({"model": run.model})
    job = PlannedJob(config.model, device, run.model["max_position_embeddings"], run.batch[0], "fp32")
    return Stepper(job).step(LayoutChoice(**run.layout, micro_batch_size=run.batch[1])).total  # type: ignore[arg-type]
