"""All Triton kernels on this machine's GPU.

They are compared with the limits of the device, with torch and with Liger. Each group of cases runs in its
own process (`kernel_run.py`) with a time limit. Results are written immediately; the file keeps the earlier
results of groups that are not measured.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report

GROUPS = (
    "cross_entropy",
    "norm",
    "adamw",
    "grad_norm",
    "swiglu",
    "dropout",
    "rotary",
    "loss",
    "attention",
    "experts",
    "fp8",
    "quantized",
    "hybrid",
    "sparse",
)
SECONDS = 570.0  # time limit of all groups together
# fraction of the remaining time that a group may take: everything for the last one, 0.35 for others
SHARE = {"attention": 1.0}
GRACE = 40.0  # seconds beyond its limit for a process to finish its case
COLUMNS = {
    "kernel": "kernel",
    "shape": "shape",
    "µs": "us:,.0f",
    "GB/s": "gbps:,.0f",
    "TFLOP/s": "tflops:,.0f",
    "of measured": "of_measured:.0%",
    "× limit": "times_limit:.2f",
    "× eager": "eager:.2f",
    "× compile": "compiled:.2f",
    "× Liger": "liger:.2f",
    "others": "others",
    "extra MiB": "extra_mib:,.0f",
    "error": "error",
}
TUNED_COLUMNS = {
    "kernel": "kernel",
    "shape": "shape",
    "tuned": "tuned",
    "table's µs": "us:,.1f",
    "best µs": "best_us:,.1f",
    "gain": "gain:.1%",
    "best setting": "best",
}
PEERS = {"torch eager": "eager", "torch.compile": "compiled", "Liger": "liger"}

Save = Callable[[dict[str, Any]], Path]


def compare(
    groups: Sequence[str],
    *,
    tune: bool,
    smoke: bool,
    kept: Sequence[dict[str, Any]],
    save: Save,
    progress: Callable[[str], None],
) -> Path:
    """Measure the groups, and write the results after each.

    Args:
        kept: earlier results; those of other groups are kept.
    """
    ends, rows = time.monotonic() + SECONDS, [row for row in kept if row["group"] not in groups]
    device, path = dict[str, Any](), Path()
    jobs = [("device", *groups)] if smoke else [("device",), *((group,) for group in groups)]
    for job in jobs:
        left = ends - time.monotonic()
        seconds = min(left - GRACE, max(SHARE.get(job[0], 0.35) * left, 60.0))
        measured = measure_groups(job, {"tune": tune, "device": device}, seconds, smoke, progress)
        if "device" in job:
            device = measured.pop(0)
            if "name" not in device:
                raise report.BenchmarkError(f"Could not measure the device: {device['error']}")
        rows += measured
        path = save(_content(device, rows, tune))
    return path


def measure_groups(
    job: Sequence[str],
    spec: dict[str, Any],
    seconds: float,
    smoke: bool,
    progress: Callable[[str], None],
    grace: float = GRACE,
) -> list[dict[str, Any]]:
    """Return the rows of a process that measures these groups.

    If it fails, the last row contains the error.
    """
    measured: list[dict[str, Any]] = []

    def hear(row: dict[str, Any]) -> None:
        measured.append({"commit": report.commit(), **row})
        progress(summary(row))

    if seconds <= 0:
        return [{"group": group, "kernel": group, "error": "out of time"} for group in job]
    progress(f"{', '.join(job)}, up to {seconds:.0f} s")
    spec = {"leave_out": [], **spec, "groups": job, "seconds": seconds, "smoke": smoke}
    environment = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""} if smoke else {}
    failure = report.stream(
        "benchmarks.kernel_run", spec, hear, environment=environment, limit_s=seconds + grace
    )
    if failure is not None:
        measured.append({"group": job[-1], "kernel": job[-1], "error": failure})
        progress(f"{', '.join(job)}: {failure}")
    return measured


def _content(device: dict[str, Any], rows: list[dict[str, Any]], tune: bool) -> dict[str, Any]:
    targets = [
        {**target, "kernel": row["kernel"], "shape": row["shape"]}
        for row in rows
        for target in row.get("targets", ())
    ]
    rows = sorted(rows, key=lambda row: GROUPS.index(row["group"]))
    if tune:
        rows = [{**row, "gain": row["us"] / row["best_us"] - 1 if row.get("us") else None} for row in rows]
    return {"device": device, "results": rows, "targets": targets}


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """Return a result as a row of the table. Ratios are the time of others over ours."""
    ratios = {name: peer["ratio"] for name, peer in row.get("peers", {}).items() if "ratio" in peer}
    others = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items() if name not in PEERS)
    extra = row.get("extra_bytes")
    short = {key: ratios.get(name) for name, key in PEERS.items()}
    return {
        "shape": "",
        **row,
        **short,
        "others": others or None,
        "extra_mib": None if extra is None else extra / 2**20,
    }


def summary(row: dict[str, Any]) -> str:
    """Return a result as a progress line."""
    if "name" in row:
        return (
            f"{row['name']}: {row['bytes_per_second'] / 1e12:.2f} TB/s, {row['flops'] / 1e12:.0f} TFLOP/s in "
            "bf16"
        )
    if "tuned" in row:
        return (
            f"{row['tuned']} of {row['kernel']}, {row['shape']}: table {row['us']} µs, best {row['best_us']} "
            f"µs with {row['best']}"
        )
    line = shown(row)
    if row["us"] is None:
        return f"{row['kernel']}, {row['shape']}: {row['error']}"
    reached = ", ".join(
        f"{name} {format(line[key], style)}" for name, key, style in _figures() if line.get(key) is not None
    )
    return f"{row['kernel']}, {row['shape']}: {row['us']:,.0f} µs, {reached}"


def _figures() -> list[tuple[str, str, str]]:
    fields = {name: field.partition(":") for name, field in COLUMNS.items() if ":" in field and name != "µs"}
    return [(name, key, style) for name, (key, _, style) in fields.items()]


def earlier(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a results file, if it exists."""
    return json.loads(path.read_text(encoding="utf-8"))["results"] if path.exists() else []
