"""This machine, without importing torch: its GPUs, cores and memory, and the versions of what is
installed."""

from __future__ import annotations

import importlib.metadata
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

DRIVER = Path("/proc/driver/nvidia")
SHARED_MEMORY = {"cuda": 64 << 20, "cpu": 4 << 20}
"""Bytes of /dev/shm per rank: NCCL's buffers within a machine, or messages between tensor-parallel ranks.
Docker's default is 64 MB."""


@dataclass(frozen=True)
class GpuInfo:
    """A GPU of this machine. Memory is in bytes, None if nvidia-ml-py is not installed."""

    name: str
    memory: int | None = None


def gpus() -> list[GpuInfo]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES makes visible."""
    devices = _from_nvml()
    if devices is None:
        devices = _from_driver()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return devices
    chosen = [index.strip() for index in visible.split(",") if index.strip()]
    if chosen and re.match(r"[A-Za-z]", chosen[0]):  # names of devices
        return devices[: len(chosen)]
    # CUDA hides all from the first invalid index on
    valid = takewhile(lambda index: index.isdecimal() and int(index) < len(devices), chosen)
    return [devices[int(index)] for index in valid]


def _from_nvml() -> list[GpuInfo] | None:
    """Query nvidia-ml-py; None if it is not installed or finds no driver."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [
            GpuInfo(str(pynvml.nvmlDeviceGetName(handle)), int(pynvml.nvmlDeviceGetMemoryInfo(handle).total))
            for handle in handles
        ]
    except pynvml.NVMLError:
        return None


def _from_driver() -> list[GpuInfo]:
    names = []
    for path in sorted(DRIVER.glob("gpus/*/information")):
        with suppress(OSError):
            names += re.findall(r"^Model:\s*(.+?)\s*$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return [GpuInfo(name) for name in names]


def driver_version() -> str | None:
    """Return the version of the NVIDIA kernel module."""
    with suppress(OSError):
        if match := re.search(r"\s(\d+\.[\d.]+)\s", (DRIVER / "version").read_text(encoding="utf-8")):
            return match[1]
    return None


def usable_cores() -> int:
    """Return the number of cores available to this process.

    Respects its affinity and, in a container, its CPU quota.
    """
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
        count = min(count, max(1, -(-int(quota) // int(period))))
    return count


def local_world_size() -> int:
    """Return the number of ranks that torchrun started on this machine; 1 without torchrun."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def memory_bytes() -> int:
    """Return the memory of the host, or the container's limit if it is lower."""
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):
        size = min(size, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8")))
    return size


def version_of(package: str) -> str | None:
    """Return the version of an installed distribution, or None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
