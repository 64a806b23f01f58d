"""How a step ends: the gradient norm, then the optimizer, with or without waiting for the whole pipeline.

Under most schedules all ranks finish together, and one all-reduce gives everyone the norm. Under zb-h2 and zb-v ranks finish one after the
other, and as long as none waits for the last one, the next step fills what would be a bubble (Qi et al. 2023, section 4). So there the norm
travels as a chain: each rank adds its part to what comes from the rank before it, and the last rank sends the total back.

A rank that does not wait for the total assumes that the step will be neither clipped nor skipped, keeps a copy of its shard of the
optimizer state, and updates. When the total arrives, during the first forwards of the next step, it confirms that. If it does not, every
rank restores its copy, updates as it should have, and does those forwards again. The result is that of waiting, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite

import torch
from torch import Tensor

from megalite.mesh import Mesh
from megalite.optimizer.adamw import AdamW
from megalite.optimizer.loss_scale import LossScale
from megalite.optimizer.norm import GradientNorm, NormChain, clip_divisor
from megalite.parallel.sharding.store import ParameterStore
from megalite.training.guard import Guard

STOPS = 3  # which of the summed numbers counts the ranks that want to stop


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
    sums: Tensor = field(default_factory=lambda: torch.zeros(4, dtype=torch.float64))  # over the world: loss, Pace, stops

    fault: str | None = None  # why it is not applied
    streak: int = 0  # steps in a row that were not, up to this one


class Closing:
    """Ends steps on one rank.

    Args:
        guard: judges each step once its totals are known.
        chained: whether the schedule's ranks finish one after the other, so that a step may end before the total is known.
    """

    def __init__(
        self, store: ParameterStore, optimizer: AdamW, mesh: Mesh, grad_clip: float, loss_scale: LossScale, guard: Guard, *, chained: bool
    ):
        self.store, self.optimizer, self.grad_clip, self.loss_scale, self.guard = store, optimizer, grad_clip, loss_scale, guard
        self.norm = GradientNorm(store, mesh)
        self.chain = NormChain(self.norm, mesh) if chained else None
        self.skipped = 0  # steps without an update
        self.pending: Update | None = None  # a step whose total is on its way
        self._known: list[Update] = []
        self._copies: list[Tensor] = []
        self._calm = False  # the last step neither clipped nor was skipped, and nobody wants to stop

    def close(self, update: Update, numbers: Sequence[float | Tensor], wait: bool) -> None:
        """Update the weights; `numbers` is this rank's part of the sums. Where a `pending` is left, `validate` or `settle` must follow."""
        if self.chain is None:
            self._learn(update, *self.norm(numbers))
            self._apply(update)
            self._known.append(update)
            return
        self.chain.start(numbers)
        if wait or not self._calm or self.loss_scale.active:  # a scale that changed would ask for the first forwards again
            self._learn(update, *self.chain.total())
            self._apply(update)
            self._known.append(update)
            return
        self.pending = update
        if self.chain.is_last:  # it knows the total already, and keeps it to itself: all ranks must act upon it after the same step
            self._learn(update, *self.chain.total())
            self._apply(update)
        else:
            self._copies = self.optimizer.copy_state()
            self._step(update, None)

    def validate(self) -> bool:
        """Learn the total of the step before; False where some rank's update was wrong. Afterwards the weights are right in both cases."""
        update, self.pending = self.pending, None
        assert update is not None and self.chain is not None
        self._known.append(update)
        if self.chain.is_last:
            return self._confirms(update)
        self._learn(update, *self.chain.total())
        right = self._confirms(update)
        if not right:
            self.store.gatherer.finish()
            self.optimizer.restore_state(self._copies)
            self._apply(update)
            if update.fault is not None:
                self.store.publish()
        self._copies = []
        return right

    def settle(self) -> None:
        """Bring a step that is pending to its end, and its totals to the other ranks. Collective."""
        if self.pending is not None:
            self.validate()
        if self.chain is not None:
            self.chain.finish()

    def take_known(self) -> list[Update]:
        """The updates whose totals have become known since the last call, in order."""
        known, self._known = self._known, []
        return known

    def _learn(self, update: Update, norm: Tensor, sums: Tensor) -> None:
        """Take note of a step's totals: the norm of its scaled gradients, and the sums."""
        update.norm, update.sums = norm / update.loss_scale, sums
        numbers, value = sums.tolist(), update.norm.item()
        update.fault = self.guard.judge(numbers[0] / update.loss_scale, value, self.loss_scale.adapts)
        update.streak = self.guard.streak
        self.loss_scale.update(isfinite(value))
        self.store.reducer.confirm(update.fault is None)
        self._calm = self._confirms(update) and numbers[STOPS] == 0

    def _confirms(self, update: Update) -> bool:
        """Whether an update without clipping is right."""
        divisor = clip_divisor(update.norm, self.grad_clip)
        return update.fault is None and (divisor is None or divisor.item() == 1.0)

    def _apply(self, update: Update) -> None:
        """Update the weights now that the norm is known, unless the step is skipped."""
        if update.fault is None:
            divisor = clip_divisor(update.norm, self.grad_clip)
            if update.loss_scale != 1.0:
                scale = torch.tensor(update.loss_scale, device=update.norm.device)
                divisor = scale if divisor is None else divisor * scale
            self._step(update, divisor)
        else:
            self.skipped += 1

    def _step(self, update: Update, divisor: Tensor | None) -> None:
        self.optimizer.step(update.step - self.skipped, update.lr, divisor)
        self.store.gatherer.gather_updated()
