"""Copies between host and device memory, timed by the device's events."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor

SIZE, SMALL, REPEATS = 1 << 28, 1 << 12, 7


def _seconds(act: Callable[[], object]) -> float:
    """Return the median seconds of a call on the current stream, which waits for the streams that it uses."""
    act()
    times = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        act()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return median(times)


def _bytes(size: int, place: str) -> Tensor:
    return torch.zeros(
        size, dtype=torch.uint8, device="cuda" if place == "cuda" else "cpu", pin_memory=place == "pinned"
    )


def _one_way(source: str, target: str) -> dict[str, float]:
    small, large = (
        partial(_bytes(size, target).copy_, _bytes(size, source), non_blocking=True) for size in (SMALL, SIZE)
    )
    moved = SIZE * (2 if source == target else 1)  # on the device: read and written
    return {"gbs": moved / _seconds(large) / 1e9, "latency_us": 1e6 * _seconds(small)}


def _both_ways() -> dict[str, float]:
    """Copy in both directions at the same time on two streams, and return the sum of both bandwidths."""
    up, down = (_bytes(SIZE, "pinned") for _ in range(2))
    into, out_of = (_bytes(SIZE, "cuda") for _ in range(2))
    streams = torch.cuda.Stream(), torch.cuda.Stream()

    def act() -> None:
        for stream, target, source in zip(streams, (into, down), (up, out_of), strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)

    return {"gbs": 2 * SIZE / _seconds(act) / 1e9, "latency_us": 0.0}


COPIES: dict[str, Callable[[], dict[str, float]]] = {
    "pinned memory to device": partial(_one_way, "pinned", "cuda"),
    "device to pinned memory": partial(_one_way, "cuda", "pinned"),
    "pinned memory, both ways at once": _both_ways,
    "pageable memory to device": partial(_one_way, "pageable", "cuda"),
    "device memory to device memory": partial(_one_way, "cuda", "cuda"),
}
