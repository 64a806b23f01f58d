"""How unevenly the documents of a step load the context-parallel ranks: predicted from the tiles of attention
of each rank.

The measured counterpart, from the ranks' working times, is written by `rank_times`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megalite.monitoring.metrics import StepMetrics
from megalite.monitoring.observer import Observer
from megalite.parallel.context.balanced import imbalance

if TYPE_CHECKING:
    from megalite.training.trainer import Trainer

_KEPT = 4  # steps whose number is kept until `numbers` reads it, as in `phases`


class ContextImbalance(Observer):
    """Predicts each step's imbalance for the rows of rank 0's replica; its number is read on rank 0 only."""

    def __init__(self, trainer: Trainer):
        self.trainer, self.method = trainer, trainer.config.parallel.context
        self.of_step: dict[int, float] = {}

    def after(self, step: int) -> None:
        parts = [microbatch.part for microbatch in self.trainer.loader.current]
        tiles = [part.tiles for part in parts if part is not None and part.tiles is not None]
        if tiles and self.trainer.mesh.rank == 0:
            self.of_step[step] = imbalance(tiles, self.method)
            self.of_step.pop(step - _KEPT, None)

    def numbers(self, metrics: StepMetrics) -> dict[str, Any]:
        predicted = self.of_step.pop(metrics.step, None)
        return {} if predicted is None else {"context_imbalance_predicted": predicted}
