"""Scores of the reference model of an objective: the run's model without its adapters.

They are computed by a forward pass over the microbatches of a step, before the step itself. The adapters
start at 0, so this is the model from which training started. Communication: that of the forward pass, and of
two numbers over data in `set_baseline`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from megalite.assembly.parts import Parts
from megalite.config.sections.distillation import distils
from megalite.mesh.mesh import Mesh
from megalite.model.objective.losses import SequenceLosses
from megalite.parallel.collectives import all_reduce
from megalite.parallel.microbatch import Microbatch
from megalite.parallel.pipeline.schedule import Schedule
from megalite.parallel.tensor.lora import without_adapters

if TYPE_CHECKING:
    from megalite.training.teacher import Teacher
    from megalite.training.trainer import Trainer


def teacher_of(trainer: Trainer) -> Teacher | None:
    """Return the teacher of a run, with its weights, or None if the run has none. Collective."""
    if not distils(trainer.config):
        return None
    from megalite.training.teacher import Teacher  # not needed by other objectives

    return Teacher(trainer.config, trainer.parts, trainer.mesh, trainer.device)


def run_others(trainer: Trainer, microbatches: Sequence[Microbatch]) -> None:
    """Set what the objective of a run needs of other models, if it needs any. Collective."""
    objective = trainer.objective
    if trainer.teacher is not None:
        trainer.teacher.run(microbatches)
    if objective is None or not objective.needs_reference:
        return
    plan = trainer.plan(len(microbatches), forward_only=True)
    score(trainer.parts, plan, microbatches)
    if objective.needs_baseline:
        trainer.weight_updater.drain()  # these scores are of the weights of the last step
        set_baseline(trainer.parts, plan, microbatches, trainer.mesh)


def score(
    parts: Parts, schedule: Schedule, microbatches: Sequence[Microbatch], adapters: bool = False
) -> None:
    """Set `Sequences.reference` of microbatches on the ranks of the last stage. Collective.

    Dropout is off.

    Args:
        schedule: of forwards only.
        adapters: whether to score with the adapters instead.
    """
    with ExitStack() as stack:
        if not adapters:
            stack.enter_context(without_adapters(parts.store.weights))
        for stage in parts.stages.values():
            if isinstance(stage.sequence_losses, SequenceLosses):
                stack.enter_context(stage.sequence_losses.scoring())
        parts.runtime.run(schedule, microbatches, step=0, loss_scale=0.0, training=False)


def set_baseline(parts: Parts, schedule: Schedule, microbatches: Sequence[Microbatch], mesh: Mesh) -> None:
    """Set `Sequences.baseline` of microbatches on the ranks of the last stage. Collective.

    It is the mean log-ratio of the mismatched sequences of the global batch, or 0 if that is negative.
    """
    mismatched = [each.mismatched for each in microbatches if each.mismatched is not None]
    scores = []
    for adapters in (True, False):
        score(parts, schedule, mismatched, adapters)
        each = [sequences.reference for sequences in (one.sequences for one in mismatched) if sequences]
        scores.append([values for values in each if values is not None])
    if not scores[0]:  # this rank has no head
        return
    ratios = torch.cat(scores[0]) - torch.cat(scores[1])
    own = torch.stack([ratios.sum(), ratios.new_tensor(len(ratios))])
    # cp ranks have the same sequences
    total, count = all_reduce(own * (mesh.cp.rank == 0), mesh.data).wait()
    baseline = (total / count.clamp(min=1)).clamp(min=0)
    for microbatch in microbatches:
        assert microbatch.sequences is not None, "preferences have sequences"
        microbatch.sequences = microbatch.sequences._replace(baseline=baseline)
