"""How a step ends: the gradient norm, then clipping and the optimizer, with or without waiting for the whole pipeline.

Two independent choices. How the norm is summed: by one all-reduce, or along the pipeline (`optimizer.norm`). And whether the step waits
for it. Under most schedules all ranks finish together and wait. Under zb-h2 and zb-v ranks finish one after the other, and as long as none
waits for the last one, the next step fills what would be a bubble (Qi et al. 2023, section 4).

A rank that does not wait assumes that the step will be neither clipped nor skipped, keeps a copy of its shard of the optimizer state, and
updates. When the total arrives, during the first forwards of the next step, it confirms that. If it does not, every rank restores its copy,
updates as it should have, and does those forwards again. The result is that of waiting, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite

import torch
from torch import Tensor

from megalite.optimizer.interface import Optimizer
from megalite.optimizer.loss_scale import LossScale
from megalite.optimizer.norm import NormReduction, clip_divisor
from megalite.parallel.sharding.store import ParameterStore
from megalite.training.guard import Guard


@dataclass(frozen=True)
class StepStatistics:
    """What a step sums over all ranks, besides the squares of gradients; each rank gives its part. The order of the fields is fixed."""

    loss: Tensor | float = 0.0  # summed token losses · loss scale / valid tokens of the global batch
    busy: float = 0.0  # seconds inside compute actions
    wall: float = 0.0  # seconds from the first action to the last, on the ranks that frame the step
    stops: float = 0.0  # ranks that want to stop

    def values(self) -> list[Tensor | float]:
        """The fields in their order."""
        return [self.loss, self.busy, self.wall, self.stops]


@dataclass
class Update:
    """One optimizer step: what it is made of and, once all ranks have added their part, what is known of it."""

    step: int  # 1-based
    lr: float
    started: float  # seconds on this rank's clock
    loss_scale: float = 1.0  # of its gradients
    samples: int = 0  # global index of its first one
    seconds: float = 0.0
    tokens: int = 0  # valid tokens of the global batch
    norm: Tensor = field(default_factory=lambda: torch.tensor(torch.nan, dtype=torch.float64))  # 0-d
    loss: float = 0.0  # of the global batch, without the loss scale
    totals: StepStatistics = field(default_factory=StepStatistics)  # over all ranks
    fault: str | None = None  # why it is not applied
    streak: int = 0  # steps in a row that were not, up to this one


class StepFinalizer:
    """Ends steps on one rank, each when its norm is known.

    Args:
        norm: how the norm and the statistics are summed over the ranks.
        guard: judges each step once its totals are known.

    Attributes:
        skipped: steps without an update.
        pending: a step that has updated and whose totals are not known yet.
    """

    def __init__(
        self, store: ParameterStore, optimizer: Optimizer, norm: NormReduction, grad_clip: float, loss_scale: LossScale, guard: Guard
    ):
        self.store, self.optimizer, self.norm, self.grad_clip = store, optimizer, norm, grad_clip
        self.loss_scale, self.guard = loss_scale, guard
        self.skipped = 0
        self.pending: Update | None = None
        self._known: list[Update] = []

    def finish(self, update: Update, own: StepStatistics, wait: bool = True) -> None:
        """Sum the norm and every rank's statistics, clip and update. After `wait` the totals are known."""
        self.norm.start(own.values())
        self._learn(update)
        self._apply(update)
        self._known.append(update)

    def confirm(self) -> bool:
        """Learn the totals of the pending step; False where its update was wrong. Afterwards the weights are right in both cases."""
        raise RuntimeError("no step is pending: this finalizer waits for every norm")

    def drain(self) -> None:
        """Bring the pending step to its end, and what is sent to its receivers. Collective."""
        if self.pending is not None:
            self.confirm()
        self.norm.finish()

    def take_known(self) -> list[Update]:
        """The updates whose totals have become known since the last call, in order."""
        known, self._known = self._known, []
        return known

    def _learn(self, update: Update) -> None:
        """Wait for a step's totals and judge it."""
        norm, sums = self.norm.total()
        update.norm, update.totals = norm / update.loss_scale, StepStatistics(*sums.tolist())
        update.loss = float(update.totals.loss) / update.loss_scale
        value = update.norm.item()
        update.fault = self.guard.judge(update.loss, value, self.loss_scale.adapts)
        update.streak = self.guard.streak
        self.loss_scale.update(isfinite(value))
        self.store.reducer.confirm(update.fault is None)

    def _is_unclipped(self, update: Update) -> bool:
        """Whether an update without clipping is right."""
        divisor = clip_divisor(update.norm, self.grad_clip)
        return update.fault is None and (divisor is None or divisor.item() == 1.0)

    def _apply(self, update: Update) -> None:
        """Update the weights now that the norm is known, unless the step is skipped."""
        if update.fault is not None:
            self.skipped += 1
            return
        divisor = clip_divisor(update.norm, self.grad_clip)
        if update.loss_scale != 1.0:  # unscaling and clipping are one division
            scale = torch.tensor(update.loss_scale, device=update.norm.device)
            divisor = scale if divisor is None else divisor * scale
        self._update_weights(update, divisor)

    def _update_weights(self, update: Update, divisor: Tensor | None) -> None:
        self.optimizer.step(update.step - self.skipped, update.lr, divisor)
        self.store.gatherer.gather_updated()


class OptimisticStepFinalizer(StepFinalizer):
    """Ends a step before its norm is known, where the last one neither clipped nor was skipped and nobody wants to stop."""

    def __init__(
        self, store: ParameterStore, optimizer: Optimizer, norm: NormReduction, grad_clip: float, loss_scale: LossScale, guard: Guard
    ):
        super().__init__(store, optimizer, norm, grad_clip, loss_scale, guard)
        self._copies: list[Tensor] = []
        self._expects_unclipped = False

    def finish(self, update: Update, own: StepStatistics, wait: bool = True) -> None:
        """Update the weights. Where a step is left `pending`, `confirm` or `drain` must follow."""
        if wait or not self._expects_unclipped or self.loss_scale.active:  # a changed loss scale would ask for the first forwards again
            super().finish(update, own)
            return
        self.norm.start(own.values())
        self.pending = update
        if self.norm.knows_total:  # this rank keeps the total to itself: all ranks must act upon it after the same step
            self._learn(update)
            self._apply(update)
        else:
            self._copies = self.optimizer.copy_state()
            self._update_weights(update, None)

    def confirm(self) -> bool:
        update, self.pending = self.pending, None
        assert update is not None
        self._known.append(update)
        if self.norm.knows_total:
            return self._is_unclipped(update)
        self._learn(update)
        right = self._is_unclipped(update)
        if not right:
            self.store.gatherer.finish()
            self.optimizer.restore_state(self._copies)
            self._apply(update)
            if update.fault is not None:
                self.store.publish()
        self._copies = []
        return right

    def _learn(self, update: Update) -> None:
        super()._learn(update)
        self._expects_unclipped = self._is_unclipped(update) and update.totals.stops == 0
