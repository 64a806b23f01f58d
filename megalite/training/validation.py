"""Validation: the mean loss over the tokens of each validation set.

Losses are summed over all ranks and divided once.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megalite.parallel.collectives import all_reduce
from megalite.parallel.microbatch import IGNORE_INDEX
from megalite.system.activity import READING, REDUCING, REPORTING

if TYPE_CHECKING:
    from megalite.data.dataset import Dataset
    from megalite.training.trainer import Trainer


@dataclass(frozen=True)
class Losses:
    """Mean losses in nats per token, the same on every rank.

    Attributes:
        mean: over the tokens of all sets.
        by_set: for each set that has a name.
    """

    mean: float
    by_set: dict[str, float] = field(default_factory=dict)

    def of(self, name: str | None) -> float:
        """Return the loss of a set, or the mean over all sets for None."""
        return self.mean if name is None else self.by_set[name]


def losses(trainer: Trainer) -> Losses:
    """Validate with the weights, or with their average if `validation.ema` is set. Collective."""
    assert trainer.validation_data is not None, "data.validation is not set"
    activity = trainer.mesh.activity
    trainer.drain()  # the weights of an unconfirmed step may be wrong
    activity.enter(REPORTING)
    average = trainer.average if trainer.config.validation.ema else None
    sets = trainer.validation_data.sets
    with nullcontext() if average is None else average.in_use():
        sums = torch.stack([_sums(trainer, data) for data in sets.values()])  # [sets, 2]
    activity.enter(REDUCING)
    sums = all_reduce(sums, trainer.mesh.world).wait()
    means = (sums[:, 0] / sums[:, 1].clamp(min=1)).tolist()
    total = sums.sum(0)
    mean = (total[0] / total[1].clamp(min=1)).item()
    activity.enter(REPORTING)
    return Losses(mean, {name: mean for name, mean in zip(sets, means, strict=True) if name})


def _sums(trainer: Trainer, data: Dataset) -> Tensor:
    """Return the summed loss and the token count of a set on this rank, [2] fp64.

    Each token is counted on one rank.
    """
    plan = trainer.forward_schedule
    loader = trainer.loader_of(data, data.samples_per_epoch)
    has_loss = trainer.mesh.pp.rank == plan.placement[-1] and trainer.mesh.tp.rank == 0
    total = torch.zeros(2, dtype=torch.float64, device=trainer.device)
    try:
        trainer.mesh.activity.enter(READING)
        for microbatches in loader.epoch(trainer.config.validation.batches):
            on_device = [microbatch.to(trainer.device) for microbatch in microbatches]
            statistics, _ = trainer.parts.runtime.run(plan, on_device, step=0, loss_scale=1.0, training=False)
            if has_loss:
                total[0] += statistics["loss"]
                total[1] += sum(
                    int((microbatch.targets != IGNORE_INDEX).sum()) for microbatch in microbatches
                )
            trainer.mesh.activity.enter(READING)
    finally:
        loader.close()
    return total
