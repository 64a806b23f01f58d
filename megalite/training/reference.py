"""Scores of the reference model of an objective: the run's model without its adapters, or what it was asked
once.

The former are computed by a forward pass over the microbatches of a step, before the step itself. The
adapters start at 0, so this is the model from which training started. The latter are in a directory
(`data.sequence_scores`), from which the rows have them. Communication: that of the forward pass, and of
two numbers over data in `set_baseline`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megalite.assembly.parts import Parts
from megalite.assembly.scoring import score
from megalite.config.errors import ConfigError
from megalite.config.schema import Config
from megalite.config.sections.distillation import distils
from megalite.config.sections.preference import scores_directory
from megalite.data.dataset import Dataset
from megalite.data.sequence_scores import SequenceScores, attach_scores
from megalite.mesh.mesh import Mesh
from megalite.parallel.collectives import all_reduce
from megalite.parallel.microbatch import Microbatch
from megalite.parallel.pipeline.schedule import Schedule

if TYPE_CHECKING:
    from megalite.training.teacher import Teacher
    from megalite.training.trainer import Trainer


def teacher_of(trainer: Trainer) -> Teacher | None:
    """Return the teacher of a run, with its weights, or None if the run has none. Collective."""
    if not distils(trainer.config):
        return None
    from megalite.training.teacher import Teacher  # not needed by other objectives

    return Teacher(trainer.config, trainer.parts, trainer.mesh, trainer.device)


def stored_scores(config: Config) -> SequenceScores | None:
    """Return the scores of the reference of a run; None: it has none.

    Raises:
        ConfigError: they are of another model than the one from which training starts.
    """
    directory = scores_directory(config.preference)
    if directory is None:
        return None
    scores, start = SequenceScores.of(Path(directory)), config.model.initial_weights
    if config.preference.allow_reference_change:
        return scores
    option = f"preference.reference = {config.preference.reference} has scores of {scores.model}"
    accept = "or set preference.allow_reference_change to true"
    if start is None or config.lora.init_from is not None:
        raise ConfigError(
            f"{option}, but training starts from {'random weights' if start is None else 'an adapter'}. "
            "Start "
            f"from that model (model.init_from), {accept}."
        )
    from megalite.evaluation.weights_identity import weights_identity

    if weights_identity(start) != scores.weights:
        raise ConfigError(
            f"{option}, whose weights differ from those of model.init_from = {start}, from which training "
            f"starts. Score the data with the latter, {accept}."
        )
    return scores


def attach_reference(config: Config, *data: Dataset | None) -> None:
    """Let the rows of datasets have the stored scores of the reference, if the run has them.

    Raises:
        ConfigError: they are of another model or of other data, end early, or are damaged.
    """
    scores = stored_scores(config)
    if scores is None:
        return
    option = f"preference.reference = {config.preference.reference}"
    for dataset in data:
        if dataset is not None:
            attach_scores(dataset, lambda file: scores.of_file(file, option))


def run_others(trainer: Trainer, microbatches: Sequence[Microbatch]) -> None:
    """Set what the objective of a run needs of other models, if it needs any. Collective."""
    objective = trainer.objective
    if trainer.teacher is not None:
        trainer.teacher.run(microbatches)
    if objective is None or not objective.runs_reference:
        return
    plan = trainer.plan(len(microbatches), forward_only=True)
    score(trainer.parts, plan, microbatches)
    if objective.needs_baseline:
        trainer.weight_updater.drain()  # these scores are of the weights of the last step
        set_baseline(trainer.parts, plan, microbatches, trainer.mesh)


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
