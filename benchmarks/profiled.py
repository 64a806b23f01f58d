"""Profile of kernels: those of a training step by time, the idle time of the device, registers and spills."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

STEPS = 2
MOST = 20  # kernels in the list


def look(step: Callable[[], object], device: str) -> dict[str, Any]:
    """Run and profile `STEPS` steps.

    Returns:
        the most expensive kernels (on a CPU: operations), with their times for one step, and the fraction of
        the time between the start of the first kernel and the end of the last one in which no kernel ran
        (None on a CPU).
    """
    on_gpu = device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as recorded:
        for _ in range(STEPS):
            step()
        if on_gpu:
            torch.cuda.synchronize()
    events = [event for event in recorded.events() if event.device_type.name == ("CUDA" if on_gpu else "CPU")]
    spans = [(event.name, event.time_range.start, event.time_range.end) for event in events]
    own_cpu_time = [(event.name, event.self_cpu_time_total) for event in events]
    listed, total = by_time([(name, end - start) for name, start, end in spans] if on_gpu else own_cpu_time)
    return {"kernels": listed, "kernel_us": total, "idle": idle(spans) if on_gpu else None}


def by_time(times: Iterable[tuple[str, float]]) -> tuple[list[dict[str, Any]], float]:
    """Return the most expensive names with calls and microseconds of one step, and the total microseconds."""
    sums: dict[str, list[float]] = {}
    for name, us in times:
        sum_of_name = sums.setdefault(name, [0.0, 0.0])
        sum_of_name[0] += 1 / STEPS
        sum_of_name[1] += us / STEPS
    total = sum(us for _, us in sums.values())
    ordered = sorted(sums.items(), key=lambda item: -item[1][1])[:MOST]
    return [
        {"name": name, "calls": calls, "us": us, "share": us / total if total else 0.0}
        for name, (calls, us) in ordered
    ], total


def idle(spans: Iterable[tuple[str, float, float]]) -> float | None:
    """Return the fraction of the time that no span (name, start, end) covers, or None without spans."""
    ordered = sorted((start, end) for _, start, end in spans)
    if not ordered or ordered[0][0] == max(end for _, end in ordered):
        return None
    busy, reached = 0.0, ordered[0][0]
    for start, end in ordered:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return 1.0 - busy / (reached - ordered[0][0])


def launched_kernels() -> list[dict[str, Any]]:
    """Return a row for each compiled kernel of `megalite_kernels`; none if kernels are interpreted."""
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("megalite_kernels.") and name.endswith("_triton")
    ]
    functions = [function for module in modules for function in vars(module).values()]
    return [row for function in functions for row in _compiled(function)]


def _compiled(function: Any) -> Iterator[dict[str, Any]]:
    """Yield a row for each binary of a function.

    Triton 3.6 and 3.7 store them as device → (kernels by key, …).
    """
    for caches in getattr(function, "device_caches", {}).values():
        for kernel in caches[0].values():
            if getattr(kernel, "n_regs", None) is not None:  # it was loaded, so it ran
                usage = {
                    "registers": kernel.n_regs,
                    "spills": kernel.n_spills,
                    "shared": kernel.metadata.shared,
                }
                yield {"name": function.__name__, "warps": kernel.metadata.num_warps, **usage}
