"""Suggested changes after an out-of-memory error, with the estimated memory that each of them saves.

They are ordered from changes with a small cost in time to those with a large one: smaller microbatches,
recomputation, sequence parallelism, a higher ZeRO stage, more tensor or pipeline parallelism instead of data
parallelism, and offloading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from megalite.config.dims import ParallelDims
from megalite.config.errors import ConfigError
from megalite.config.rules import check
from megalite.config.schema import Config
from megalite.mesh.mesh import Mesh
from megalite.monitoring.tracing import write_snapshot
from megalite.parallel.pipeline.schedule import ScheduleError
from megalite.system.text import aligned

Changes = dict[str, Any]
"""Option → new value."""
Peak = Callable[[Config], int]
"""Function of a configuration that returns the peak memory of the rank that needs the most, in bytes."""


@dataclass(frozen=True)
class MemorySaving:
    """A valid change that saves memory."""

    changes: Changes
    saved: int  # bytes on the rank that uses the most

    def row(self) -> tuple[str, str]:
        """Return the options and the saved memory as text."""
        options = " ".join(f"--{option} {str(value).lower()}" for option, value in self.changes.items())
        saved = f"{self.saved / 2**30:,.1f} GiB" if self.saved >= 2**30 else f"{self.saved / 2**20:,.1f} MiB"
        return options, f"saves {saved}"


def changed(config: Config, changes: Changes) -> Config:
    """Return a copy of the configuration with other values."""
    for option, value in changes.items():
        section, key = option.split(".")
        config = replace(config, **{section: replace(getattr(config, section), **{key: value})})
    return config


def candidates(config: Config) -> Iterator[Changes]:
    """Yield candidate changes in order. Some of them may not be valid."""
    train, parallel = config.train, config.parallel
    smaller = [size for size in range(1, train.micro_batch_size) if train.micro_batch_size % size == 0]
    for size in reversed(smaller):
        yield {"train.micro_batch_size": size}
    for mode in (
        ("selective", "full") if train.recompute == "none" else ("full",) if train.recompute != "full" else ()
    ):
        yield {"train.recompute": mode}
    if parallel.tp > 1 and not parallel.sequence_parallel:
        yield {"parallel.sequence_parallel": True}
    for stage in range(parallel.zero + 1, 4):
        yield {"parallel.zero": stage}
    dp = ParallelDims.of(config).dp
    for axis, size in (("tp", parallel.tp), ("pp", parallel.pp)) if dp % 2 == 0 else ():
        yield {f"parallel.{axis}": 2 * size, "parallel.dp": dp // 2}
    for place in {"none": ("cpu", "disk"), "cpu": ("disk",)}.get(parallel.offload, ()):
        yield {"parallel.offload": place}


def ladder(config: Config, world_size: int, local_devices: int, peak: Peak) -> list[MemorySaving]:
    """Return the valid changes, each evaluated on its own."""
    savings, now = [], peak(config)
    for changes in candidates(config):
        other = changed(config, changes)
        try:
            check(other, world_size, local_devices)
            saved = now - peak(other)
        except (ConfigError, ScheduleError):
            continue
        if saved > 0:
            savings.append(MemorySaving(changes, saved))
    return savings


def describe(place: str, error: BaseException, savings: list[MemorySaving]) -> str:
    """Return the message for the user.

    Args:
        place: the rank and its current action.
    """
    lines = [f"{place}: out of memory: {str(error).strip().splitlines()[0]}"]
    if not savings:
        return (
            f"{lines[0]}\nNo change of the options of this run would reduce its memory. Use more "
            "GPUs or a smaller model."
        )
    lines.append(
        "Each of these changes alone would reduce the memory of the rank that uses the most, as "
        "estimated by the planner:"
    )
    table = aligned([saving.row() for saving in savings], left=2)
    return "\n".join([*lines, *(f"  {line}" for line in table)])


def out_of_memory(error: torch.OutOfMemoryError, config: Config, device: torch.device, mesh: Mesh) -> str:
    """Return the message for the user. On a GPU, a memory snapshot is written first."""
    from megalite.planner.api import estimate

    world_size, gpu = mesh.world.size, device.type == "cuda"

    def peak(other: Config) -> int:
        return max(memory.total for memory in estimate(other, world_size, "cuda" if gpu else "cpu"))

    place = f"rank {mesh.rank} in step {mesh.activity.step}, {mesh.activity.action}"
    message = describe(place, error, ladder(config, world_size, int(gpu), peak))
    if not gpu:
        return f"{message}\nMemory snapshots are only available on a GPU."
    return f"{message}\nMemory snapshot: {write_snapshot(config.run.directory, mesh.rank, 'out_of_memory')}"
