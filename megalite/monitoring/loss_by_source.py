"""Training loss of each member of a blend (`logging.loss_by_source`).

It is the mean over the tokens of the member's samples in the global batch. The rank with the head adds up the
token losses of each row while it computes the loss, and looks up the member of each row in the table of the
blend. Communication: one all-reduce of two numbers per member after each step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megalite.data.mixtures import Blend
from megalite.monitoring.metrics import SOURCE, StepMetrics
from megalite.monitoring.observers import Observer
from megalite.parallel.collectives import all_reduce
from megalite.parallel.microbatch import IGNORE_INDEX, Microbatch

if TYPE_CHECKING:
    from megalite.training.trainer import Trainer

AHEAD = 1  # number of steps that the trainer may be ahead of the written result


class LossBySource(Observer):
    """Observer that adds `loss/PREFIX` to a step for each member of a blend that has tokens in it."""

    def __init__(self, trainer: Trainer):
        assert isinstance(trainer.train_data, Blend), "a rule asks for a blend"
        self.world, self.names = trainer.mesh.world, [member.name for member in trainer.train_data.members]
        self._source = torch.from_numpy(trainer.train_data.period).long().to(trainer.device)  # [period]
        # losses, tokens
        self._zero = torch.zeros(2, len(self.names), dtype=torch.float64, device=trainer.device)
        # by microbatch, so that a repeated one (optimistic steps) counts once
        self._sums: dict[int, Tensor] = {}
        self._now: Microbatch | None = None
        self._totals: dict[int, Tensor] = {}  # by step
        for stage in trainer.parts.stages.values():
            if stage.head is not None and trainer.mesh.tp.rank == 0:  # tp ranks have the same losses
                stage.register_forward_pre_hook(self._begin)
                stage.head.loss = replace(stage.head.loss, observe=self._add)

    def _begin(self, stage: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Prepare for the loss of a microbatch. Called before the stage computes it."""
        _, microbatch, state, _ = inputs
        self._now = microbatch if state.training else None
        if self._now is not None:
            tokens = (microbatch.targets != IGNORE_INDEX).sum(0)  # [batch]
            self._sums[id(microbatch)] = torch.stack([self._zero[0], self._by_member(tokens)])

    def _add(self, losses: Tensor) -> None:
        """Add the token losses of a microbatch or of a chunk, [positions · batch] in position-major order."""
        if self._now is not None:
            self._sums[id(self._now)][0] += self._by_member(
                losses.detach().view(-1, len(self._now.samples)).sum(0, dtype=torch.float64)
            )

    def _by_member(self, rows: Tensor) -> Tensor:
        """Sum the rows of each member: [batch] -> [members]."""
        assert self._now is not None
        return self._zero[0].index_add(0, self._source[self._now.samples % len(self._source)], rows.double())

    def after(self, step: int) -> None:
        total = all_reduce(sum(self._sums.values(), self._zero.clone()), self.world).wait()
        self._totals = {
            known: totals for known, totals in self._totals.items() if step - AHEAD <= known < step
        } | {step: total}
        self._sums, self._now = {}, None

    def numbers(self, metrics: StepMetrics) -> dict[str, Any]:
        losses, tokens = self._totals[metrics.step].tolist()
        return {
            f"{SOURCE}{name}": loss / count
            for name, loss, count in zip(self.names, losses, tokens, strict=True)
            if count
        }
