"""The end of a step: gradient norm, clipping and optimizer update.

It may wait for the whole pipeline or not. Two choices are independent: how the norm is summed (one
all-reduce, or a chain along the pipeline: `optimizer.norm`), and whether the step waits for it. Under most
schedules all ranks finish together and wait. Under zb-h2 and zb-v they finish one after another. If no rank
waits for the last one, the forwards of the next step fill the time that would otherwise be a bubble (Qi et
al. 2023, section 4).

A rank that does not wait (`OptimisticWeightUpdater`) copies its shard of the optimizer state and updates
without clipping. The total norm arrives during the first forwards of the next step. If the step should have
been clipped or skipped, every rank restores its copy, applies the correct update, and repeats those forwards.
The weights are bitwise the same as with waiting.
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
from megalite.training.bad_steps import BadStepPolicy

if TYPE_CHECKING:
    from megalite.optimizer.averaging import WeightAverage
    from megalite.optimizer.registry import Optimizer


@dataclass(frozen=True)
class StepStatistics:
    """Statistics that a step sums over all ranks, together with the squares of its gradients.

    An instance contains either the values of one rank or the totals. They are summed in the order of the
    fields.
    """

    # sum of token losses · loss scale / valid tokens of the global batch; 0 if another rank counts it
    loss: Tensor | float = 0.0
    busy: float = 0.0  # seconds inside compute actions
    # seconds from the first action to the last, on the ranks of the first stage; 0 on others
    wall: float = 0.0
    stops: float = 0.0  # requests to stop or save (`training.stop_requests`); 0: none
    model: Tensor | None = None  # of its blocks and further losses (`model.statistics`)

    def values(self) -> list[Tensor | float]:
        """Return the fields in order."""
        return [self.loss, self.busy, self.wall, self.stops, *([] if self.model is None else [self.model])]

    @staticmethod
    def of(totals: Tensor) -> StepStatistics:
        """Return the statistics whose `values` are these totals."""
        loss, busy, wall, stops = totals[:4].tolist()
        return StepStatistics(loss, busy, wall, stops, totals[4:])


@dataclass
class OptimizerStep:
    """Inputs of one optimizer step and, once the totals over all ranks are available, its outcome."""

    number: int  # 1-based
    lr: float
    started: float  # seconds, this rank's clock
    loss_scale: float = 1.0  # factor on its gradients
    samples: int = 0  # global index of its first sample
    seconds: float = 0.0
    tokens: int = 0  # valid tokens of the global batch
    # gradient norm, [], without the loss scale; NaN: unknown
    norm: Tensor = field(default_factory=lambda: torch.tensor(torch.nan, dtype=torch.float64))
    loss: float = 0.0  # mean over the global batch, without the loss scale
    totals: StepStatistics = field(default_factory=StepStatistics)  # summed over all ranks
    fault: str | None = None  # reason why it is skipped; None if it is applied
    streak: int = 0  # consecutive skipped steps, this one included


class WeightUpdater:
    """Updater that changes the weights at the end of each step, after waiting for the gradient norm.

    Args:
        average: moving average of the weights, or None.
        norm: sums the norm and the statistics over the ranks.
        grad_clip: largest gradient norm; 0 for no clipping.
        bad_steps: accepts or rejects each step once its totals are available.

    Attributes:
        skipped: number of steps without an update.
        pending: the step that has updated the weights, but whose totals are not available yet.
    """

    def __init__(
        self,
        store: ParameterStore,
        optimizer: Optimizer,
        average: WeightAverage | None,
        norm: NormReduction,
        grad_clip: float,
        loss_scale: LossScale,
        bad_steps: BadStepPolicy,
    ):
        self.store, self.optimizer, self.average = store, optimizer, average
        self.norm, self.grad_clip = norm, grad_clip
        self.loss_scale, self.bad_steps = loss_scale, bad_steps
        self.skipped = 0
        self.pending: OptimizerStep | None = None
        self._known: list[OptimizerStep] = []

    def finish(self, step: OptimizerStep, own: StepStatistics, wait: bool = True) -> None:
        """Sum the norm and the statistics of all ranks, clip and update. Collective.

        With `wait` the totals are available on return. The device decides whether it clips or skips, by the
        rules of `_learn`. The host has queued the update before it reads the totals: on a GPU it only waits
        for the norm, and prepares the next step while the optimizer runs.
        """
        self.norm.start(own.values())
        self._update_by_total(step)
        self._known.append(step)

    def _update_by_total(self, step: OptimizerStep) -> None:
        """Wait for the total norm, and update the weights."""
        totals = self.norm.total()  # [1 + 4] fp64, on the device
        if self._offloaded:
            self._learn(step, totals.cpu())
            self._apply(step)
        else:
            read = read_later(totals)
            norm, loss = totals[0] / step.loss_scale, totals[1] / step.loss_scale
            divisor = update_divisor(norm, loss, self.grad_clip, self.bad_steps.highest)
            self._update_weights(step, divisor * step.loss_scale)
            self._learn(step, read())
            self.skipped += step.fault is not None

    @property
    def _offloaded(self) -> bool:
        """Whether the optimizer state is offloaded from a GPU, so that the update runs on the host."""
        return self.store.state.device.type != self.store.device.type

    def confirm(self) -> bool:
        """Wait for the totals of the pending step.

        If its update was wrong, corrects the weights and returns False.
        """
        raise RuntimeError(
            "no step is pending: without optimistic steps, every update waits for the gradient norm"
        )

    def drain(self) -> None:
        """Confirm the pending step and wait until all messages are delivered. Collective."""
        if self.pending is not None:
            self.confirm()
        self.norm.finish()

    def take_known(self) -> list[OptimizerStep]:
        """Return the steps whose totals have become available since the last call, in order."""
        known, self._known = self._known, []
        return known

    def _learn(self, step: OptimizerStep, totals: Tensor) -> None:
        """Record the totals of a step, and decide whether it is applied.

        Args:
            totals: its norm and statistics, [1 + 4] fp64 on the CPU, the same on all ranks.
        """
        step.norm, step.totals = totals[0] / step.loss_scale, StepStatistics.of(totals[1:])
        step.loss = float(step.totals.loss) / step.loss_scale
        value = step.norm.item()
        # before loss_scale.update, which changes `adapts`
        step.fault = self.bad_steps.judge(step.loss, value, self.loss_scale.adapts)
        step.streak = self.bad_steps.streak
        self.loss_scale.update(isfinite(value))
        # PowerSGD keeps its error feedback only for applied steps
        self.store.reducer.confirm(step.fault is None)

    def _is_unclipped(self, step: OptimizerStep) -> bool:
        """Return whether an update without clipping or skipping is correct."""
        divisor = clip_divisor(step.norm, self.grad_clip)
        return step.fault is None and (divisor is None or divisor.item() == 1.0)

    def _apply(self, step: OptimizerStep) -> None:
        """Update the weights with the total norm, unless the step is skipped."""
        if step.fault is not None:
            self.skipped += 1
            return
        divisor = clip_divisor(step.norm, self.grad_clip)
        if step.loss_scale != 1.0:  # unscaling and clipping are one division
            scale = torch.tensor(step.loss_scale, device=step.norm.device)
            divisor = scale if divisor is None else divisor * scale
        self._update_weights(step, divisor)

    def _update_weights(self, step: OptimizerStep, divisor: Tensor | None) -> None:
        # a disk may take minutes
        with self.store.mesh.activity.working() if self._offloaded else nullcontext():
            # AdamW's bias correction counts applied updates only
            self.optimizer.step(step.number - self.skipped, step.lr, divisor)
            if self.average is not None:
                self.average.update(divisor)
        # starts the all-gather; each unit's next forward waits for its own weights
        self.store.gatherer.gather_updated()


class OptimisticWeightUpdater(WeightUpdater):
    """Updater that changes the weights before the norm is available.

    This is done only if the previous step was neither clipped nor skipped and no rank requests a stop.
    """

    _copies: Sequence[Tensor] = ()  # of the weights and state before the pending update
    _expects_unclipped = False

    def finish(self, step: OptimizerStep, own: StepStatistics, wait: bool = True) -> None:
        """Update the weights. If a step is left `pending`, `confirm` or `drain` must follow."""
        if wait or not self._expects_unclipped:
            super().finish(step, own)
            return
        self.norm.start(own.values())
        self.pending = step
        if self.norm.knows_total:
            # No copy is needed. `confirm` still reports the result: all ranks act on it in the same step.
            self._update_by_total(step)
        else:
            self._copies = self.optimizer.state.copy()  # before the update: `confirm` may have to undo it
            self._update_weights(step, None)

    def confirm(self) -> bool:
        step, self.pending = self.pending, None
        assert step is not None
        self._known.append(step)
        if self.norm.knows_total:
            return self._is_unclipped(step)
        self._learn(step, self._read_total())
        correct = self._is_unclipped(step)
        if not correct:
            self.store.gatherer.finish()  # gathers of the wrong weights still write into the buckets
            self.optimizer.state.restore(self._copies)
            self._apply(step)  # gradients are still those of the pending step: no backward has run since
            if step.fault is not None:
                # nothing was applied, so the weights must be restored from the masters
                self.store.publish()
        self._copies = ()
        return correct

    def _read_total(self) -> Tensor:
        """Read the total norm, on a GPU without waiting for the queued forwards."""
        if self.store.device == torch.device("cpu"):
            return self.norm.total()
        return read_aside(self.norm.total, self.store.device)()

    def _learn(self, step: OptimizerStep, totals: Tensor) -> None:
        super()._learn(step, totals)
        self._expects_unclipped = self._is_unclipped(step) and step.totals.stops == 0
