"""Comparison of the ranks: the slowest one, and the imbalance of context parallelism.

Ranks wait for each other, so that all have the same step time, but they spend different parts of it working.
At `logging.interval` the ranks all-gather their working times. The all-gather overlaps with the next step,
and its result is read after that step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megalite.config.dims import attention_method
from megalite.monitoring.metrics import StepMetrics
from megalite.monitoring.observers import STEPS_KEPT, Observer
from megalite.monitoring.phases import PhaseTimes
from megalite.parallel.collectives import Pending, all_gather

if TYPE_CHECKING:
    from megalite.training.trainer import Trainer


def compare(step: int, working: Sequence[float]) -> dict[str, Any]:
    """Return the slowest and the fastest rank of a step, under their keys in metrics.jsonl.

    Args:
        working: working time of each rank, in seconds.
    """
    order = sorted(range(len(working)), key=working.__getitem__)
    fastest, slowest = order[0], order[-1]
    return {
        "ranks_of_step": step,
        **{"slowest_rank": slowest, "slowest_rank_working_s": working[slowest]},
        **{"fastest_rank": fastest, "fastest_rank_working_s": working[fastest]},
    }


def context_imbalance(working: Sequence[float], ranks: Sequence[int]) -> dict[str, Any]:
    """Return the working time of the slowest context-parallel rank relative to their mean.

    The result is stored under its key in metrics.jsonl.
    """
    if len(ranks) == 1:
        return {}
    own = [working[rank] for rank in ranks]
    return {"context_imbalance_measured": max(own) * len(own) / sum(own)}


class RankTimes(Observer):
    """Observer that compares the ranks.

    Nothing is in flight while torch's profiler is active, because torch crashes if a message outlives the
    profiler.
    """

    def __init__(self, trainer: Trainer, phases: PhaseTimes):
        self.world, self.cp, self.device, self.phases = (
            trainer.mesh.world,
            trainer.mesh.cp,
            trainer.device,
            phases,
        )
        self.interval, profiling = trainer.config.logging.interval, trainer.config.profiling
        first, last = profiling.steps
        self.quiet = range(first - 1, last + 1) if profiling.ranks else range(0)
        self.sent: tuple[int, Pending] | None = None
        self.arriving: tuple[int, Tensor, Callable[[], bool]] | None = None
        self.measured: dict[str, Any] = {}

    def after(self, step: int) -> None:
        self._read()
        self._receive()
        if self.world.size > 1 and step % self.interval == 0 and step not in self.quiet:
            own = torch.tensor([self.phases.working(step)], dtype=torch.float64)
            if self.device.type == "cuda":
                own = own.pin_memory().to(self.device, non_blocking=True)
            self.sent = step, all_gather(own, self.world)

    def _receive(self) -> None:
        """Receive the all-gather of the previous step; on a GPU, start an asynchronous copy to the host."""
        if self.sent is None:
            return
        (step, pending), self.sent = self.sent, None
        everyone = pending.wait()
        if everyone.is_cuda:
            there, event = (
                torch.empty(everyone.shape, dtype=everyone.dtype, pin_memory=True),
                torch.cuda.Event(),
            )
            there.copy_(everyone, non_blocking=True)
            event.record()
            self.arriving = step, there, event.query
        else:
            self.arriving = step, everyone, lambda: True
            self._read()

    def _read(self) -> None:
        if self.arriving is not None and self.arriving[2]():
            step, everyone, _ = self.arriving
            working = everyone.tolist()
            self.measured, self.arriving = (
                compare(step, working) | context_imbalance(working, self.cp.ranks),
                None,
            )

    def numbers(self, metrics: StepMetrics) -> dict[str, Any]:
        measured, self.measured = self.measured, {}
        return measured

    def finish(self) -> list[str]:
        self._receive()
        return []


class ContextImbalance(Observer):
    """Observer that predicts how unevenly documents load the context-parallel ranks of rank 0's replica.

    The prediction counts the tiles of attention on each rank; `context_imbalance` is the measurement. Only
    rank 0 reads it.
    """

    def __init__(self, trainer: Trainer):
        self.trainer, self.method = trainer, attention_method(trainer.config.parallel.context)
        self.of_step: dict[int, float] = {}

    def after(self, step: int) -> None:
        from megalite.parallel.context.balanced import imbalance  # imported only with context parallelism

        parts = [microbatch.part for microbatch in self.trainer.loader.current]
        tiles = [part.tiles for part in parts if part is not None and part.tiles is not None]
        if tiles and self.trainer.mesh.rank == 0:
            self.of_step[step] = imbalance(tiles, self.method)
            self.of_step.pop(step - STEPS_KEPT, None)

    def numbers(self, metrics: StepMetrics) -> dict[str, Any]:
        predicted = self.of_step.pop(metrics.step, None)
        return {} if predicted is None else {"context_imbalance_predicted": predicted}
