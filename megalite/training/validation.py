"""Validation: the mean loss over the tokens of each validation set, or that of the run's objective.

Losses and the metrics of the objective are summed over all ranks and divided once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megalite.parallel.collectives import all_reduce
from megalite.parallel.microbatch import IGNORE_INDEX, Microbatch
from megalite.system.activity import READING, REDUCING, REPORTING

if TYPE_CHECKING:
    from megalite.data.dataset import Dataset
    from megalite.training.trainer import Trainer


@dataclass(frozen=True)
class Losses:
    """Mean losses in nats per token, or losses of the run's objective, the same on every rank.

    Attributes:
        mean: over the tokens of all sets.
        by_set: for each set that has a name.
        metrics: those of the objective, over all sets, with the names that a training step has.
    """

    mean: float
    by_set: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

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
        sums = torch.stack([_sums(trainer, data) for data in sets.values()])  # [sets, 2, terms + metrics]
    activity.enter(REDUCING)
    sums = all_reduce(sums, trainer.mesh.world).wait()
    names = () if trainer.objective is None else trainer.objective.metrics
    losses, measured = sums.split([sums.shape[-1] - len(names), len(names)], dim=-1)
    means = _mean(losses).tolist()
    mean = _mean(losses.sum(0)).item()
    totals = zip(names, *measured.sum(0).tolist(), strict=True)
    activity.enter(REPORTING)
    return Losses(
        mean,
        {name: mean for name, mean in zip(sets, means, strict=True) if name},
        {name: total / count for name, total, count in totals if count},
    )


def _mean(sums: Tensor) -> Tensor:
    """Return the loss, given the sums of its terms and what they are divided by, [..., 2, terms] -> [...]."""
    return (sums[..., 0, :] / sums[..., 1, :].clamp(min=1)).sum(-1)


def _sums(trainer: Trainer, data: Dataset) -> Tensor:
    """Return the summed loss and the token count of a set on this rank, [2, 1] fp64.

    Each token is counted on one rank. With an objective over sequences: its terms and its metrics, and what
    they are divided by, [2, terms + metrics].
    """
    plan = trainer.forward_schedule
    loader = trainer.loader_of(data, data.samples_per_epoch)
    sums = []
    try:
        trainer.mesh.activity.enter(READING)
        for microbatches in loader.epoch(trainer.config.validation.batches):
            on_device = [microbatch.to(trainer.device) for microbatch in microbatches]
            if trainer.other is not None:
                trainer.other.run(on_device)
            statistics, _ = trainer.parts.runtime.run(plan, on_device, step=0, loss_scale=1.0, training=False)
            if trainer.parts.statistics is not None:
                trainer.parts.statistics.own(statistics)  # what a block has noted is not of the next step
            sums.append(_sums_of_batch(trainer, microbatches, statistics))
            trainer.mesh.activity.enter(READING)
    finally:
        loader.close()
    has_loss = trainer.mesh.pp.rank == plan.placement[-1] and trainer.mesh.tp.rank == 0
    return torch.stack(sums).sum(0) * has_loss


def _sums_of_batch(
    trainer: Trainer, microbatches: Sequence[Microbatch], statistics: Mapping[str, Tensor]
) -> Tensor:
    """Return `_sums` of a global batch.

    Args:
        statistics: those of this rank's stages.
    """
    if trainer.objective is None:
        terms = statistics["loss"].view(1)
        counts = torch.tensor([sum(int((each.targets != IGNORE_INDEX).sum()) for each in microbatches)])
    else:
        from megalite.model.objective.counting import counts_of
        from megalite.model.objective.statistics import STATISTIC, TERMS

        counts = counts_of(trainer.objective, microbatches)
        # on the device also where there is no head
        none = statistics["loss"].new_zeros(len(counts))
        terms = statistics.get(TERMS, none)
        measured = statistics.get(STATISTIC, none.new_zeros(len(trainer.objective.metrics), 2))
        sums = torch.cat([torch.stack([terms, counts.to(terms)]), measured.T.to(terms)], dim=1)
        return sums * (trainer.mesh.cp.rank == 0)  # cp ranks have the same sequences
    return torch.stack([terms, counts.to(terms)])
