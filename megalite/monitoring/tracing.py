"""Traces of selected steps and ranks by torch's profiler, and snapshots of GPU memory.

The actions of the pipeline are named ranges in the traces.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megalite.config import run_files
from megalite.monitoring.observers import Observer
from megalite.system.activity import REPORTING
from megalite.system.messages import write_or_say

if TYPE_CHECKING:
    from megalite.training.trainer import Trainer

MOST_ENTRIES = 100_000  # maximum number of allocations and frees in a memory snapshot


class Tracer(Observer):
    """Observer that traces `profiling.steps` on `profiling.ranks`.

    The traces are written to traces/profile_rank_00000.json in the run directory.
    """

    def __init__(self, trainer: Trainer):
        options, self.trainer, self.activity = trainer.config.profiling, trainer, trainer.mesh.activity
        first, self.last = options.steps
        self.wanted = range(first, self.last + 1) if options.ranks else range(0)
        self.mine = trainer.mesh.rank in options.ranks
        self.path = trainer.run_dir / run_files.TRACES / f"profile_rank_{trainer.mesh.rank:05d}.json"
        self.running = False
        self.profile: Any = None
        self.place: Any = None
        self.range: Any = None

    def __call__(self, place: Any) -> None:
        """Start a named range in the trace. A wait is part of the action that waits."""
        if not self.activity.waiting and place is not self.place:
            self._end_range()
            self.place, self.range = place, torch.autograd.profiler.record_function(str(place))
            self.range.__enter__()

    def _end_range(self) -> None:
        if self.range is not None:
            self.range.__exit__(None, None, None)
            self.range = self.place = None

    def before(self, step: int) -> None:
        if step in self.wanted and not self.running:
            self.running = True
            if self.mine:
                self._start()

    def after(self, step: int) -> None:
        if self.running and step >= self.last:
            self._stop()

    def finish(self) -> list[str]:
        if self.running:
            self._stop()
        return []

    def _start(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        kinds = [
            ProfilerActivity.CPU,
            *([ProfilerActivity.CUDA] if self.trainer.device.type == "cuda" else []),
        ]
        self.profile = profile(activities=kinds)
        self.profile.start()
        self.activity.listeners += (self,)

    def _stop(self) -> None:
        """End the trace and write it. Collective.

        Everything in flight ends first, because torch crashes if a message outlives its profiler.
        """
        self.running = False
        self.activity.listeners = tuple(
            listener for listener in self.activity.listeners if listener is not self
        )
        self._end_range()
        self.trainer.saver.wait()
        self.trainer.drain()
        self.activity.enter(REPORTING)
        if self.profile is None:
            return
        self.profile.stop()
        write_or_say(self.path, lambda path: self.profile.export_chrome_trace(str(path)))
        self.profile = None


class MemorySnapshot(Observer):
    """Observer that writes a snapshot of GPU memory after the step `profiling.memory_snapshot`.

    It can be viewed at pytorch.org/memory_viz.
    """

    def __init__(self, trainer: Trainer):
        options, self.trainer = trainer.config.profiling, trainer
        mine = trainer.mesh.rank in (options.ranks or [0]) and trainer.device.type == "cuda"
        self.step = options.memory_snapshot if mine else None
        if self.step is not None:
            torch.cuda.memory._record_memory_history(max_entries=MOST_ENTRIES)

    def after(self, step: int) -> None:
        if step == self.step:
            write_snapshot(self.trainer.run_dir, self.trainer.mesh.rank, f"step_{step:08d}")


def write_snapshot(run_dir: Path, rank: int, moment: str) -> Path:
    """Write a snapshot of this process's GPU memory, with the recorded stack traces of allocations."""
    path = run_dir / run_files.TRACES / f"memory_rank_{rank:05d}_{moment}.pickle"
    write_or_say(path, lambda path: torch.cuda.memory._dump_snapshot(str(path)))
    return path
