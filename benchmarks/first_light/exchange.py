"""Part 6: bandwidth and latency of the links, compared with the assumptions of the planner.

It measures copies between host and device, and collectives and messages by size. Two ranks that share a GPU
are not measured, because they are not connected by anything that training would use.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks import report
from benchmarks.first_light.rows import Row, Scene, absent, guarded, row
from megalite.planner.api import Device, find_device, find_device_by_driver_name
from megalite.planner.hardware.links import Fabric, group

LIMIT_S = 60.0
ASSUMED_ON_CPU = "h100"  # what the rehearsal compares with, so that the comparison runs


def rows(scene: Scene) -> Iterator[Row]:
    device = find_device_by_driver_name(scene.gpus[0]) if scene.gpus else find_device(ASSUMED_ON_CPU)
    if scene.gpus:
        yield from _host(device)
    else:
        yield absent("host and device", "no GPU found")
    if len(scene.gpus) == 1:
        yield absent("collectives", "only one GPU found")
        return
    yield from _collectives(scene, device)


def _host(device: Device | None) -> Iterator[Row]:
    """Measure copies between pinned or pageable memory and the device, and on the device."""
    from benchmarks import host_copies

    assumed = f", assumed {device.host.bandwidth / 1e9:,.1f}" if device else ""
    for name, act in host_copies.COPIES.items():
        yield guarded(name, "measurement", partial(_copy, name, act, assumed if "pinned" in name else ""))


def _copy(name: str, act: Any, assumed: str) -> Row:
    figures = act()
    return row(
        name, "measured", f"{figures['gbs']:,.1f} GB/s{assumed}, {figures['latency_us']:.1f} µs", **figures
    )


def _collectives(scene: Scene, device: Device | None) -> Iterator[Row]:
    ranks = len(scene.gpus) or 2
    sizes = [1 << 10, 1 << 14, 1 << 18] if scene.rehearse else [1 << power for power in (12, 16, 20, 24, 28)]
    spec = {"device": scene.device, "sizes": sizes}
    limit = min(LIMIT_S, scene.left - 3.0)
    module = "benchmarks.first_light.exchange_rank"
    result = report.launch(module, spec, ranks=ranks, threads=1, limit_s=limit)
    for name, measured in result.items():
        if "error" in measured:
            yield row(name, "missing", measured["error"])
            continue
        yield _by_size(name, measured["sizes"], ranks, device)


def _by_size(name: str, measured: list[dict[str, float]], ranks: int, device: Device | None) -> Row:
    """Return the bus bandwidth, computed as in nccl-tests, and the times that the planner assumes."""
    for each in measured:
        each["assumed_us"] = 1e6 * assumed(name, each["bytes"], ranks, device) if device else None  # type: ignore[assignment]
    largest, smallest = measured[-1], measured[0]
    beside = f", assumed {largest['assumed_us']:,.0f} µs" if device else ""
    at_most = (
        f"{largest['bytes'] / 2**20:,.2f} MiB: {largest['gbs']:,.2f} GB/s, {largest['us']:,.0f} µs{beside}"
    )
    return row(name, "measured", f"{at_most}; smallest {smallest['us']:,.0f} µs", ranks=ranks, sizes=measured)


def assumed(name: str, size: float, ranks: int, device: Device) -> float:
    """Return the seconds that the planner assumes.

    It has no all-to-all, in which each rank sends as much as in half an all-reduce.
    """
    fabric, members = Fabric(device), group(device, ranks, 1)
    if name == "message":
        return fabric.send(size, ranks)
    return fabric.all_reduce(size, members) if name == "all-reduce" else fabric.half(size, members)
