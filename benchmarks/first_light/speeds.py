"""Part 7: all kernels of `megalite benchmark kernels`: time, fraction of the device's limit, and registers.

They are compared with torch, Liger and others. With --short two processes measure all groups, without the
peers that torch.compile has to compile first; otherwise each group has its own process. Time that a group
does not use is available to the following ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from benchmarks import kernels
from benchmarks.first_light.rows import Row, Scene, absent, row
from benchmarks.kernel_cases import COMPILED

REHEARSED = ("norm", "swiglu")
COMPILED_FIRST = [COMPILED, "flex_attention"]
GRACE_S = 8.0  # for a process to finish its case


def rows(scene: Scene) -> Iterator[Row]:
    if find_spec("triton") is None:
        yield absent("kernels", "triton is not installed")
        return
    device: dict[str, Any] = {}
    jobs = _jobs(scene)
    for number, job in enumerate(jobs):
        seconds = min(scene.left - GRACE_S, 2.0 * scene.left / (len(jobs) - number))
        spec = {"tune": False, "device": device, "leave_out": COMPILED_FIRST if scene.short else []}
        measurements = kernels.measure_groups(job, spec, seconds, scene.rehearse, lambda line: None, GRACE_S)
        if "device" in job:
            device = measurements.pop(0)
            if "name" not in device:
                yield row("the device", "missing", str(device["error"]))
                return
            yield _device(device)
        yield from map(_kernel, measurements)
    if scene.rehearse:
        yield absent("registers and spills", "kernels run in the interpreter")


def _jobs(scene: Scene) -> list[tuple[str, ...]]:
    """Return the groups of each process. The first one measures the device."""
    if scene.rehearse:
        return [("device", *REHEARSED)]
    others = [group for group in kernels.GROUPS if group != "attention"]
    return (
        [("device", *others), ("attention",)]
        if scene.short
        else [("device",), *((group,) for group in kernels.GROUPS)]
    )


def _device(device: dict[str, Any]) -> Row:
    detail = (
        f"a copy reaches {device['bytes_per_second'] / 1e12:.2f} TB/s, a large bf16 matmul "
        f"{device['flops'] / 1e12:,.0f} TFLOP/s"
    )
    return row(
        "the device", "measured", detail, **{key: value for key, value in device.items() if key != "name"}
    )


def _kernel(kernel: dict[str, Any]) -> Row:
    name = f"{kernel['kernel']}, {kernel.get('shape', '')}".rstrip(", ")
    figures = {key: value for key, value in kernel.items() if key not in ("kernel", "shape")}
    if kernel.get("us") is None:
        return row(name, "missing", str(kernel["error"]), **figures)
    detail = kernels.summary(kernel).removeprefix(f"{name}: ")
    if binaries := kernel.get("compiled"):
        worst = max(binaries, key=lambda each: (each["spills"], each["registers"]))
        detail += f"; {worst['registers']} registers, {worst['spills']} spills"
    return row(name, "measured", detail, **figures)
