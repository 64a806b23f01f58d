"""Functions of measured processes: times of steps and matmuls, memory, specification and result."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any, NoReturn

import torch


def timed(step: Callable[[], object], warmup: int, steps: int) -> list[float]:
    """Return the seconds of each of `steps` calls, after `warmup` untimed ones.

    On a GPU, calls must synchronize.
    """
    for _ in range(warmup):
        step()
    seconds = []
    for _ in range(steps):
        started = perf_counter()
        step()
        seconds.append(perf_counter() - started)
    return seconds


def matmul_peak(size: int, dtype: torch.dtype, repeats: int = 8, device: str = "cpu") -> float:
    """Return the FLOP/s of the fastest of several matmuls of [size, size] matrices.

    The settings of the process are used.
    """
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)

    def matmul() -> None:
        torch.mm(a, b, out=out)
        wait(device)

    return 2.0 * size**3 / min(timed(matmul, 2, repeats))


def wait(device: str) -> None:
    """Wait until all work on the device is done."""
    if device == "cuda":
        torch.cuda.synchronize()


def device_memory(device: str) -> dict[str, int | str | None]:
    """Return the name of the GPU, and its peak allocated and reserved bytes."""
    if device != "cuda":
        return {"device": None, "peak_allocated": None, "peak_reserved": None}
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {"device": torch.cuda.get_device_name(), "peak_allocated": allocated, "peak_reserved": reserved}


class Memory:
    """Increase of the peak resident memory since this object was created. Linux only; otherwise None."""

    def __init__(self) -> None:
        with suppress(OSError):
            # reset the peak: imports may have had a higher one
            Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
        self._base = _resident("VmRSS")

    def peak_above(self) -> int | None:
        """Return the bytes above the base, or None."""
        peak = _resident("VmHWM")
        return None if peak is None or self._base is None else peak - self._base


def _resident(field: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), None)


def read_spec() -> dict[str, Any]:
    """Return the specification of this process: the JSON file that is its only argument."""
    spec: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    return spec


def finish(spec: dict[str, Any], result: dict[str, Any] | None) -> NoReturn:
    """Write the result (None on ranks without one) and exit immediately.

    A regular exit would take seconds, because torch shuts down slowly.
    """
    if result is not None:
        Path(spec["result"]).write_text(json.dumps(result), encoding="utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
