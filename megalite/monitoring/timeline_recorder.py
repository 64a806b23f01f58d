"""Records the measured timeline: the times of every compute action and data-parallel transfer of a few steps,
on every rank.

The runtime times its actions in every step. Those of `profiling.steps` are kept here, gathered after the last
of these steps, and written by rank 0, as measured, to traces/records.json. `timeline.py` aligns them to one
clock and compares them with the simulator.
"""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megalite.config.errors import ConfigError
from megalite.monitoring.observers import Observer
from megalite.monitoring.timeline import RECORDS, Record, compare, describe, written
from megalite.system.clock import DeviceClock, HostClock
from megalite.system.messages import write_or_say

if TYPE_CHECKING:
    from megalite.training.trainer import Trainer

BARRIERS = 5  # readings of each clock: hosts are aligned by the median of their differences


class TimelineRecorder(Observer):
    """Records `profiling.steps` on this rank if `profiling.timeline` is set, and compares them at the end.

    Every rank must make the same calls.
    """

    def __init__(self, trainer: Trainer):
        options = trainer.config.profiling
        self.trainer, self.runtime, self.record = trainer, trainer.parts.runtime, Record(host_name())
        self.log, self.resting = trainer.store.log, trainer.parts.runtime.clock
        self.measuring = DeviceClock() if trainer.device.type == "cuda" else HostClock()
        first, self.last = options.steps
        self.wanted = range(first, self.last + 1) if options.timeline else range(0)
        self.summary: list[str] = []  # on rank 0, once the records are written

    def before(self, step: int) -> None:
        if step in self.wanted:
            self.log.clock = self.runtime.clock = self.measuring

    def after(self, step: int) -> None:
        """Keep the step's timings; collect after the last step."""
        if step not in self.wanted:
            return
        self.record.steps[step] = self.runtime.ran
        self.record.transfers[step] = self.log.take()
        self.log.clock, self.runtime.clock = None, self.resting
        if step == self.last:
            self.collect()

    def collect(self) -> None:
        """Gather the records, and write them on rank 0. Collective."""
        if not self.record.steps:
            return
        records = gather(self.record, self.trainer.mesh.world.size)
        if records is not None:
            steps = sorted(self.record.steps)
            if write_or_say(path := self.trainer.run_dir / RECORDS, partial(write, records)):
                self.summary = [f"steps {steps[0]} to {steps[-1]} are recorded: {path}"]
        self.record = Record(self.record.host)

    def finish(self) -> list[str]:
        """Write the steps recorded so far if the run ended early, and compare them with the simulator.
        Collective.

        Rank 0 writes and compares.
        """
        self.collect()
        if self.wanted and not self.summary and self.trainer.mesh.rank == 0:
            return [
                "no timeline: the run has done none of profiling.steps = "
                f"{self.trainer.config.profiling.steps}"
            ]
        return [*self.summary, *self._comparison()] if self.summary else []

    def _comparison(self) -> list[str]:
        """The simulator's prediction for the recorded steps, in lines."""
        directory = self.trainer.run_dir
        try:
            return [*describe(compare(directory)), written(directory)]
        except (ConfigError, OSError) as error:  # a full disk, or no directory: the run itself is done
            return [f"no comparison with the simulator: {error}"]


def host_name() -> str:
    """An identity shared by processes with one monotonic clock: the kernel's boot id, or else the host
    name."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return socket.gethostname()


def gather(record: Record, world: int) -> list[Record] | None:
    """The records of all ranks, on rank 0; None elsewhere. Collective."""
    if world == 1:
        return [record]
    for _ in range(BARRIERS):
        dist.barrier()
        record.clock.append(perf_counter())
    records: list[Any] | None = [None] * world if dist.get_rank() == 0 else None
    dist.gather_object(record, records)
    return records


def write(records: list[Record], path: Path) -> None:
    """Write the records of all ranks."""
    path.write_text(json.dumps(list(map(vars, records)), allow_nan=False), encoding="utf-8")
