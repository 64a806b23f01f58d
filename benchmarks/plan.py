"""Compares the planner with this machine: predicted and measured steps of a small Llama on five layouts.

The device is calibrated right before, with as many ranks of one thread each as the layouts have. The two are independent: calibration
measures matrix products, memory bandwidth and collectives; the steps are run by the trainer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import overhead, report
from megalite.config.load import from_dict
from megalite.planning.hardware import Device, read_device
from megalite.planning.peaks import peak_flops
from megalite.planning.step import Choice, Job, Stepper

COLUMNS = {
    "layout": "layout",
    "ranks": "ranks",
    "measured ms": "measured_ms:,.1f",
    "predicted ms": "predicted_ms:,.1f",
    "predicted / measured": "ratio:.2f",
}
LAYOUTS: tuple[dict[str, int], ...] = ({"zero": 0}, {"tp": 2, "zero": 0}, {"pp": 2, "zero": 0}, {"dp": 2, "zero": 0}, {"dp": 2, "zero": 1})
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
SMOKE = {"sizes": [16, 32], "rows": [16, 16], "logits": [16, 32], "attention": [16, 2, 8], "messages": [1 << 8, 1 << 14]}


def calibrate(smoke: bool = False) -> dict[str, Any]:
    """Measure this machine; returns a device in the form that `megalite/planning/hardware.py` reads."""
    gpu = report.gpu()
    ranks = 2 if gpu is None else _gpus()
    spec: dict[str, Any] = {"device": "cpu" if gpu is None else "cuda", "ranks": ranks, **(ON_CPU if gpu is None else ON_GPU)}
    found = report.launch("benchmarks.calibrate", spec | (SMOKE if smoke else {}), ranks=ranks, threads=1)
    return _device(found, gpu, ranks)


def _gpus() -> int:
    """The number of GPUs of this machine."""
    import torch

    return torch.cuda.device_count()


def _device(found: dict[str, Any], gpu: str | None, ranks: int) -> dict[str, Any]:
    """A device's row of hardware.yaml. The network between machines is not measured but set to the link inside one."""
    where = report.machine()
    best = max(found["products"].values()) / 1e3
    within = found.pop("within", {"gbs": 1.0, "latency_us": 10.0})
    common = {
        **found,
        "measured": True,
        "multiprocessors": 1,
        "sustained": 1.0,
        "memory_gib": round((where["memory_gib"] or 4.0) / ranks, 1),
        "within": within,
        "between": dict(within),
        "gpus_per_node": ranks,
        "host_memory_gbs": found["memory_gbs"],
        "host": {"gbs": found["memory_gbs"], "latency_us": 1.0},
    }
    if gpu is None:
        return {**common, "cpu": True, "tflops": {"fp32": best}, "host_us": 0.0}
    return {**common, **_gpu(gpu, best)}


def _gpu(name: str, best: float) -> dict[str, Any]:
    """A GPU's properties. Its products are modelled by tiles, at the fraction of its peak that the fastest measured product reached."""
    import torch

    device, peak = torch.cuda.get_device_properties(0), peak_flops(name, "bf16")
    found = {"products": {}, "multiprocessors": device.multi_processor_count, "memory_gib": round(device.total_memory / 2**30, 1)}
    return found | ({"tflops": {"bf16": best, "fp16": best}} if peak is None else {"device": name, "sustained": best * 1e12 / peak})


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
                spec = {"config": overhead.config_of(run, Path(scratch)), "warmup_steps": warmup, "steps": steps, "product_steps": 0}
                run.results.append(report.launch("benchmarks.ours", spec | {"peak_size": 64}, ranks=run.ranks, threads=1))
    device = read_device("here", json.loads(json.dumps(content)))
    rows = [_row(run, device) for run in runs]
    worst = max(abs(row["ratio"] - 1) for row in rows)
    target = {"target": "largest deviation of a prediction", "measured": worst, "wanted": f"≤ {TOLERANCE}", "met": worst <= TOLERANCE}
    return {"calibrated": content, "protocol": {"rounds": rounds}, "results": rows, "targets": [target]}


def _run(layout: dict[str, int], smoke: bool) -> overhead.Run:
    model = overhead.LLAMA | (overhead.SMALLER if smoke else {})
    return overhead.Run("llama", model, (4, 2) if smoke else (64, 4), (1, 2) if smoke else (2, 6), layout)


def _row(run: overhead.Run, device: Device) -> dict[str, Any]:
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


def predict(run: overhead.Run, device: Device) -> float:
    """Predicted seconds of a step."""
    config = from_dict({"model": run.model})
    job = Job(config.model, device, run.model["max_position_embeddings"], run.batch[0], "fp32")
    return Stepper(job).step(Choice(**run.layout, micro_batch_size=run.batch[1])).total  # type: ignore[arg-type]
