"""The end of a step: gradient norm, clipping and optimizer update, with or without waiting for the whole
pipeline.

Two choices are independent: how the norm is summed (one all-reduce, or a chain along the pipeline:
`optimizer.norm`), and whether the step waits for it. Under most schedules all ranks finish together and wait.
Under zb-h2 and zb-v ranks finish one after the other: if none waits for the last one, the next step's
forwards fill what would be a bubble (Qi et al. 2023, section 4).

A rank that does not wait (`OptimisticStepFinalizer`) copies its shard of the optimizer state and updates
without clipping. The total norm arrives during the first forwards of the next step. If the step should have
been clipped or skipped, every rank restores its copy, applies the right update, and repeats those forwards.
The result is bitwise that of waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megalite.optimizer.loss_scale import LossScale
from megalite.optimizer.norm import NormReduction, clip_divisor, update_divisor
from megalite.parallel.sharding.store import ParameterStore
from megalite.system.pinned_memory import read_aside, read_later
from megalite.training.guard import Guard

if TYPE_CHECKING:
    from megalite.optimizer.averaging import WeightAverage
    from megalite.optimizer.registry import Optimizer


@dataclass(frozen=True)
class StepStatistics:
    """What a step sums over all ranks together with the squares of gradients: each rank's part, or the total.
    Field order is fixed."""

    # sum of token losses · loss scale / valid tokens of the global batch; 0 where another rank counts it
    loss: Tensor | float = 0.0
    busy: float = 0.0  # seconds inside compute actions
    # seconds from the first action to the last, on the ranks of the first stage; 0 on others
    wall: float = 0.0
    stops: float = 0.0  # what a rank requests: 0, or more if it asks for the end of the run (`signals`)
    router: Tensor | None = None  # those of mixtures of experts (`parallel.expert.balance`), of all layers

    def values(self) -> list[Tensor | float]:
        """The fields, in order."""
        return [self.loss, self.busy, self.wall, self.stops, *([] if self.router is None else [self.router])]

    @staticmethod
    def of(totals: Tensor) -> StepStatistics:
        """The fields from the sums of their values."""
        loss, busy, wall, stops = totals[:4].tolist()
        return StepStatistics(loss, busy, wall, stops, totals[4:])


@dataclass
class Update:
    """One optimizer step: its inputs and, once the totals over all ranks are known, its outcome."""

    step: int  # 1-based
    lr: float
    started: float  # seconds, this rank's clock
    loss_scale: float = 1.0  # factor on its gradients
    samples: int = 0  # global index of its first sample
    seconds: float = 0.0
    tokens: int = 0  # valid tokens of the global batch
    # [], without the loss scale; NaN: unknown
    norm: Tensor = field(default_factory=lambda: torch.tensor(torch.nan, dtype=torch.float64))
    loss: float = 0.0  # mean over the global batch, without the loss scale
    totals: StepStatistics = field(default_factory=StepStatistics)  # summed over all ranks
    fault: str | None = None  # why it is not applied; None: it is
    streak: int = 0  # consecutive steps that were not applied, this one included


class StepFinalizer:
    """Finishes steps on one rank; each waits for its norm.

    Args:
        average: of the weights; None: the run keeps none.
        norm: sums the norm and the statistics over the ranks.
        grad_clip: largest gradient norm; 0: no clipping.
        guard: accepts or rejects each step once its totals are known.

    Attributes:
        skipped: number of steps without an update.
        pending: a step that has updated the weights, but whose totals are not known yet.
    """

    def __init__(
        self,
        store: ParameterStore,
        optimizer: Optimizer,
        average: WeightAverage | None,
        norm: NormReduction,
        grad_clip: float,
        loss_scale: LossScale,
        guard: Guard,
    ):
        self.store, self.optimizer, self.average, self.norm, self.grad_clip = (
            store,
            optimizer,
            average,
            norm,
            grad_clip,
        )
        self.loss_scale, self.guard = loss_scale, guard
        self.skipped = 0
        self.pending: Update | None = None
        self._known: list[Update] = []

    def finish(self, update: Update, own: StepStatistics, wait: bool = True) -> None:
        """Sum the norm and all ranks' statistics, clip and update. With `wait` the totals are known on
        return. Collective.

        The device decides whether it clips or skips, by the rules of `_learn`. The host, which reads the
        totals, has queued the update by then: on a GPU it waits for the norm only, and prepares the next step
        while the optimizer runs.
        """
        self.norm.start(own.values())
        self._update_by_total(update)
        self._known.append(update)

    def _update_by_total(self, update: Update) -> None:
        """Wait for the total norm, and update the weights."""
        totals = self.norm.total()  # [1 + 4] fp64, on the device
        if self._offloaded:
            self._learn(update, totals.cpu())
            self._apply(update)
        else:
            read = read_later(totals)
            norm, loss = totals[0] / update.loss_scale, totals[1] / update.loss_scale
            self._update_weights(
                update, update_divisor(norm, loss, self.grad_clip, self.guard.highest) * update.loss_scale
            )
            self._learn(update, read())
            self.skipped += update.fault is not None

    @property
    def _offloaded(self) -> bool:
        """Whether the optimizer's state is offloaded from a GPU, so that the update runs on the host."""
        return self.store.state.device.type != self.store.device.type

    def confirm(self) -> bool:
        """Wait for the totals of the pending step. Returns False if its update was wrong; the weights are
        corrected in that case."""
        raise RuntimeError("no step is pending: this finalizer waits for every norm")

    def drain(self) -> None:
        """Confirm the pending step and wait until all messages are delivered. Collective."""
        if self.pending is not None:
            self.confirm()
        self.norm.finish()

    def take_known(self) -> list[Update]:
        """Updates whose totals became known since the last call, in order."""
        known, self._known = self._known, []
        return known

    def _learn(self, update: Update, totals: Tensor) -> None:
        """Decide whether a step is applied, by its norm and statistics: [1 + 4] fp64 on the CPU, the same on
        all ranks."""
        update.norm, update.totals = totals[0] / update.loss_scale, StepStatistics.of(totals[1:])
        update.loss = float(update.totals.loss) / update.loss_scale
        value = update.norm.item()
        # before loss_scale.update, which changes `adapts`
        update.fault = self.guard.judge(update.loss, value, self.loss_scale.adapts)
        update.streak = self.guard.streak
        self.loss_scale.update(isfinite(value))
        # PowerSGD keeps its error feedback only for applied steps
        self.store.reducer.confirm(update.fault is None)

    def _is_unclipped(self, update: Update) -> bool:
        """Whether an update without clipping or skipping is right."""
        divisor = clip_divisor(update.norm, self.grad_clip)
        return update.fault is None and (divisor is None or divisor.item() == 1.0)

    def _apply(self, update: Update) -> None:
        """Update the weights with a known norm, unless the step is skipped."""
        if update.fault is not None:
            self.skipped += 1
            return
        divisor = clip_divisor(update.norm, self.grad_clip)
        if update.loss_scale != 1.0:  # unscaling and clipping are one division
            scale = torch.tensor(update.loss_scale, device=update.norm.device)
            divisor = scale if divisor is None else divisor * scale
        self._update_weights(update, divisor)

    def _update_weights(self, update: Update, divisor: Tensor | None) -> None:
        # a disk may need minutes
        with self.store.mesh.activity.working() if self._offloaded else nullcontext():
            # AdamW's bias correction counts applied updates only
            self.optimizer.step(update.step - self.skipped, update.lr, divisor)
            if self.average is not None:
                self.average.update(divisor)
        # starts the all-gather; each unit's next forward waits for its own weights
        self.store.gatherer.gather_updated()


class OptimisticStepFinalizer(StepFinalizer):
    """Finishes a step before its norm is known, if the previous one was neither clipped nor skipped and no
    rank requests a stop."""

    _copies: Sequence[Tensor] = ()  # of the weights and state before the pending update
    _expects_unclipped = False

    def finish(self, update: Update, own: StepStatistics, wait: bool = True) -> None:
        """Update the weights. If a step is left `pending`, `confirm` or `drain` must follow."""
        if wait or not self._expects_unclipped:
            super().finish(update, own)
            return
        self.norm.start(own.values())
        self.pending = update
        # no copy needed; the result is still reported at `confirm`, so that all ranks act on it in the same
        # step
        if self.norm.knows_total:
            self._update_by_total(update)
        else:
            self._copies = self.optimizer.state.copy()  # before the update: `confirm` may have to undo it
            self._update_weights(update, None)

    def confirm(self) -> bool:
        update, self.pending = self.pending, None
        assert update is not None
        self._known.append(update)
        if self.norm.knows_total:
            return self._is_unclipped(update)
        self._learn(update, self._read_total())
        right = self._is_unclipped(update)
        if not right:
            self.store.gatherer.finish()  # gathers of the wrong weights still write into the buckets
            self.optimizer.state.restore(self._copies)
            self._apply(update)  # gradients are still those of the pending step: no backward has run since
            if update.fault is not None:
                # nothing was applied: the weights must be taken from the restored masters
                self.store.publish()
        self._copies = ()
        return right

    def _read_total(self) -> Tensor:
        """Read the total norm, on a GPU not behind the forwards that are queued."""
        if self.store.device == torch.device("cpu"):
            return self.norm.total()
        return read_aside(self.norm.total, self.store.device)()

    def _learn(self, update: Update, totals: Tensor) -> None:
        super()._learn(update, totals)
        self._expects_unclipped = self._is_unclipped(update) and update.totals.stops == 0
